"""The checkpoint of text that is being counted: its counts so far, how far that is, and of what."""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xtok.counting.counts import Chunks, Counts
from xtok.counting.texts import Place, Texts
from xtok.errors import XtokError
from xtok.io import replacing

if TYPE_CHECKING:
    from xtok.counting.pair_text import TextCounter, Wanted
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


# What NumPy, zipfile and json raise for a damaged file; RuntimeError for one that is marked as
# encrypted or compressed by another method.
_DAMAGE = (ValueError, KeyError, TypeError, EOFError, OSError, RuntimeError, zipfile.BadZipFile)


class Checkpoint:
    """A file that is replaced now and then while text is counted.

    Args:
        path: of the file.
        texts: what is counted; its digests tell whether a resumed run has the same text.
        tokenizers: what counts it.
        wanted: what is counted.
        seconds: how often the file is replaced.
    """

    def __init__(
        self,
        path: Path,
        texts: Texts,
        tokenizers: Sequence[Tokenizer],
        wanted: Wanted,
        seconds: float,
    ) -> None:
        self._path, self._texts, self._seconds = path, texts, seconds
        run = {
            "tokenizers": [digest_of(one) for one in tokenizers],
            "files": [(file.name, file.stat().st_size) for file in texts.digests],
            "fields": [(shard.field, shard.group_by) for shard in texts.shards[:1]],
            "wanted": asdict(wanted),
        }
        self._run = hashlib.sha256(json.dumps(run).encode()).hexdigest()
        self._saved = time.monotonic()

    def save(self, counter: TextCounter, place: Place, *, now: bool) -> None:
        """Save the counts, now or if it is time to."""
        if not (now or time.monotonic() > self._saved + self._seconds):
            return
        read = [(digest.size, digest.sha256) for digest in self._texts.digests.values()]
        about = {"run": self._run, "place": place, "read": read, "totals": asdict(counter.totals)}
        arrays: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
        arrays |= {f"tokens_{number}": tokens for number, tokens in enumerate(counter.tokens)}
        for name, tally in counter.tallies.items():
            keys, amounts, chunks = tally.counts()
            arrays |= {f"{name}_keys": keys, f"{name}_amounts": amounts}
            arrays |= {f"{name}_{of}": array for of, array in chunks._asdict().items()}
        with replacing(self._path) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)
        self._saved = time.monotonic()

    def load(self, counter: TextCounter) -> Place:
        """Add what was saved, if the file exists, to the counts; return how far that is.

        Raises:
            XtokError: if the file is of another run, or damaged.
        """
        if not self._path.exists():
            return Place()
        try:
            with self._path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
                arrays = dict(saved)
            about = json.loads(arrays["about"].tobytes())
            if about["run"] != self._run or not self._is_same_text(about["read"]):
                raise XtokError(
                    f"the checkpoint {self._path} is of another run: other texts, tokenizers or "
                    "options",
                    hint=self._hint,
                )
            for number, tokens in enumerate(counter.tokens):
                tokens += arrays[f"tokens_{number}"]
            for name, tally in counter.tallies.items():
                chunks = Chunks(*(arrays[f"{name}_{of}"] for of in Chunks._fields))
                tally.add_counts(Counts(arrays[f"{name}_keys"], arrays[f"{name}_amounts"], chunks))
            counter.totals.add(type(counter.totals)(**about["totals"]))
            return Place(*about["place"])
        except _DAMAGE as error:
            raise XtokError(
                f"the checkpoint {self._path} cannot be read: {error}", hint=self._hint
            ) from error

    @property
    def _hint(self) -> str:
        return f"delete it to start again: rm {self._path}"

    def _is_same_text(self, read: Sequence[Any]) -> bool:
        """Tell whether the files still begin with what was read of them."""
        for digest, (size, sha256) in zip(self._texts.digests.values(), read, strict=True):
            digest.read_to(size)
            if digest.sha256 != sha256:
                return False
        return True
