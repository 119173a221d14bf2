"""Training across tokenizers: collators, losses, an objective, and trainers."""

import lazy_loader

# `__init__.pyi` lists the names; each is imported at its first use, so that a trainer's library is
# needed only by its own trainer.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
