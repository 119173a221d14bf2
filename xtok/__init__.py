"""Knowledge distillation between models with different tokenizers.

>>> import xtok
>>> events = xtok.events("meta-llama/Llama-3.2-1B", "Qwen/Qwen3-8B")  # doctest: +SKIP
>>> events.save("llama_to_qwen.safetensors")  # doctest: +SKIP
"""

import lazy_loader

__version__ = "0.1.0"

# `__init__.pyi` lists the public names. Each name is imported at its first use.
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name in ("load_map", "load"):
        raise AttributeError(f"xtok has no {name}; use for example xtok.ProjectionMap.load")
    return _load(name)
