"""Trainers of other libraries with xtok: one module per library, imported at its first use."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submodules=["nemo_rl", "transformers", "trl"]
)
