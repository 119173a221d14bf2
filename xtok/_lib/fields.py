"""Declare and validate the fields of configs and the parameters of commands."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

MAIN = "Options"
"""First panel of the help."""

MODELS = "Models"
MAKING = "Making the map"
MATCHING = "Which tokens match"
COMPUTING = "Computing"
TEXT = "Text"
LIMITS = "Limits and keys"
OUTPUT = "Output"

RARE = "Rarely needed"
"""Last panel of the help."""


@dataclass(frozen=True, kw_only=True)
class OptionDetails:
    """Details of an option, in addition to its name, type and default."""

    help: str
    name: str | None = None  # name on the command line; None: the parameter's name
    short: str | None = None  # such as -k
    argument: str | None = None  # for a positional argument, its name in the help
    flag: bool = False  # flag without a --no- form
    hidden: bool = False  # omitted from the help
    metavar: str | None = None
    panel: str | None = None  # panel of the help
    min: float | None = None  # inclusive limits
    max: float | None = None
    above: float | None = None  # exclusive limits
    below: float | None = None
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Names and values of other options. At least one of the other options must have its value.

    True stands for any value.
    """
    no_effect_with: Mapping[str, Any] = field(default_factory=dict)
    parser: Callable[[str], Any] | None = None
    autocompletion: Callable[[str], list[str]] | None = None  # default: choices or files


def option(default: Any, help: str, **details: Any) -> Any:
    """Declare a field of a config or a parameter of a command.

    If `default` is `...`, users must set the option. Configs must call this function or
    `top_k_option` directly, because the API reference parses the calls of the two functions.
    """
    return field(default=default, metadata={"details": OptionDetails(help=help, **details)})


_types = functools.cache(get_type_hints)


class Config:
    """Base class of all configs. Validates each value against its field."""

    panel = MAKING  # panel of the help for options that declare no panel

    @classmethod
    def or_default(cls, config: Self | None) -> Self:
        """Return the config, or the defaults for None."""
        if config is not None and not isinstance(config, cls):
            raise TypeError(f"config is {config!r}, expected a {cls.__name__}")
        return cls() if config is None else config

    def __post_init__(self) -> None:
        """Validate all fields, and convert NumPy numbers."""
        types = _types(type(self))  # type: ignore[arg-type]  # classes are hashable
        for f in fields(self):  # type: ignore[arg-type]  # every config is a dataclass
            value, details = getattr(self, f.name), f.metadata["details"]
            vars(self)[f.name] = checked_value(f.name, value, types[f.name], details)


def checked_value(name: str, value: Any, kind: Any, details: OptionDetails) -> Any:
    """Validate and return the value of an option. A number becomes an `int` or `float`."""
    if value is None and NoneType in get_args(kind):
        return value
    kind = without_none(kind)
    base = get_origin(kind) or kind
    if base is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} is {value!r}, expected one of {get_args(kind)}")
        return value
    accepted, description = _KINDS.get(base, (object, ""))
    if not isinstance(value, accepted) or (isinstance(value, bool) and base in (int, float)):
        raise ValueError(f"{name} is {value!r}, expected {description}")
    if base is tuple:
        return tuple(
            checked_value(f"{name}, number {number},", item, get_args(kind)[0], details)
            for number, item in enumerate(value, start=1)
        )
    if base in (int, float):
        _check_range(name, value, details)
        return base(value)
    return value


def _check_range(name: str, value: float, details: OptionDetails) -> None:
    ends = {key: end for key in _ENDS if (end := getattr(details, key)) is not None}
    if isfinite(value) and all(_ENDS[key][1](value, end) for key, end in ends.items()):
        return
    words = [f"{_ENDS[key][0]} {end}" for key, end in ends.items()]
    expected = ", ".join(words) if len(words) > 1 else " and ".join([*words, "finite"])
    raise ValueError(f"{name} is {value}, expected {expected}")


def without_none(kind: Any) -> Any:
    """Return `T` for the type `T | None`. Other types are returned unchanged."""
    kinds = [k for k in get_args(kind) if k is not NoneType]
    return kinds[0] if NoneType in get_args(kind) else kind


_KINDS: Mapping[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: (str, "a string"),
    tuple: (tuple, "a tuple"),
}

_ENDS = {
    "min": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "max": ("at most", operator.le),
    "below": ("below", operator.lt),
}
