"""Training with teachers that have other tokenizers: collators, losses and trainers."""

import lazy_loader

# `__init__.pyi` lists the names. Each name is imported at its first use, so Transformers and TRL
# are needed only for their trainers.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
