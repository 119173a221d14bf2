"""Training with a map: losses, module, collator, objective, and trainers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["losses"])
