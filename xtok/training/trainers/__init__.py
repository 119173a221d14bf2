"""xtok inside other libraries' trainers: one module per library, imported when it is asked for."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submodules=["nemo_rl", "transformers", "trl"]
)
