"""The digest of a tokenizer: its tokens, and how it splits a sample text."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer

_PROBE = (
    "I'LL say:\r\n\n\tif x1 == 12345:  # don't\n        Straße, cafe\u0301, ﬁn … "
    "天気は三つ目 １２３ <s>\n"
)


def digest_of(tokenizer: Tokenizer) -> str:
    """Return a digest of a tokenizer's tokens, and of how it splits a sample text.

    Tokenizers with equal tables may differ in split pattern or normalizer.
    """
    behavior = [tokenizer.table.sha256(), *map(list, tokenizer.library_ids([_PROBE]))]
    return hashlib.sha256(json.dumps(behavior).encode()).hexdigest()
