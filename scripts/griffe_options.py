"""An extension of Griffe (used by mkdocstrings) for the options of configs.

A config field declares its default and its help in a call of `option`, in `xtok/config.py` or
`xtok/training/losses/config.py`. The reference shows the default as the value and the help as the
docstring.
"""

from __future__ import annotations

from typing import Any

from griffe import Attribute, Docstring, ExprCall, ExprKeyword, Extension

from xtok import config

MODULES = ("xtok.config", "xtok.training.losses.config")


class OptionFields(Extension):
    """Set the default and the help of each field that `option` declares."""

    def on_attribute_instance(self, *, attr: Attribute, **kwargs: Any) -> None:
        """Read the call, as it stands in the source."""
        call = attr.value
        if attr.module.path not in MODULES or not isinstance(call, ExprCall):
            return
        if str(call.function) not in ("option", "top_k_option"):
            return
        default, text = call.arguments[:2]
        about = {a.name: str(a.value) for a in call.arguments if isinstance(a, ExprKeyword)}
        if str(call.function) == "top_k_option":
            about = {"min": "1", "max": "MAX_ENTRIES"}
        words = {"min": "at least", "above": "above", "max": "at most", "below": "below"}
        limits = [f"{word} `{about[end]}`" for end, word in words.items() if end in about]
        about_range = f" Range: {', '.join(limits)}." if limits else ""
        attr.value = default
        attr.docstring = Docstring(eval(str(text), {**vars(config)}) + about_range, parent=attr)
