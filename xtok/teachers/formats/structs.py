"""What msgspec, which `serve` needs and files do not, reads and writes of servers' answers."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

Triple: TypeAlias = tuple[float | None, int, Any]


class VllmEntry(msgspec.Struct, gc=False):
    """A candidate of a token as vLLM writes it."""

    logprob: float | None
    rank: int | None = None


class Choice(msgspec.Struct):
    """A sequence of vLLM's answer."""

    prompt_logprobs: list[dict[int, VllmEntry] | None] | None = None


class Completion(msgspec.Struct):
    """An answer of vLLM's."""

    choices: list[Choice] = []


class Meta(msgspec.Struct):
    """What SGLang says of a sequence."""

    input_token_logprobs: list[Triple] | None = None
    input_top_logprobs: list[list[Triple] | None] | None = None


class Generated(msgspec.Struct):
    """An answer of SGLang's."""

    meta_info: Meta
