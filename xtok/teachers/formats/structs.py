"""Responses of servers as msgspec structs.

Only `serve` and `check_server` require msgspec.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

Triple: TypeAlias = tuple[float | None, int, Any]


class VllmEntry(msgspec.Struct, gc=False):
    """A candidate in a response of vLLM."""

    logprob: float | None
    rank: int | None = None


class Choice(msgspec.Struct):
    """A sequence in a response of vLLM."""

    prompt_logprobs: list[dict[int, VllmEntry] | None]


class Completion(msgspec.Struct):
    """A response of vLLM."""

    choices: Annotated[list[Choice], msgspec.Meta(min_length=1)]


class Meta(msgspec.Struct):
    """Scores of a sequence in a response of SGLang."""

    input_token_logprobs: list[Triple]
    input_top_logprobs: list[list[Triple] | None]


class Generated(msgspec.Struct):
    """A response of SGLang."""

    meta_info: Meta
