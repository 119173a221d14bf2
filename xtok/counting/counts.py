"""Counts of a text: the plan, the counting, its checkpoint."""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xtok.config import BuildConfig, Target
from xtok.counting.encode import Counts, EncodedBatch, Tally, TextEncoder
from xtok.counting.texts import Place, TextShard, TextSource, describe_text, find_texts, shards
from xtok.errors import XtokError
from xtok.io import replacing
from xtok.progress import TextProgress, silent_texts
from xtok.tokenizers import Tokenizer
from xtok.vocab.display import plural

HELD_OUT = 16
"""One document in this many is held out to choose alpha on."""


@dataclass
class TextTotals:
    """What was read, and how much of it both sides spell alike; integers that add up."""

    documents: int = 0
    held_out: int = 0  # documents that alpha was chosen on
    differing: int = 0  # documents that the sides do not spell with the same bytes to the end
    num_bytes: int = 0
    lost_bytes: int = 0  # those after the first difference of a document; they are not counted
    student_tokens: int = 0
    teacher_tokens: int = 0
    starts: int = 0  # shared token boundaries
    skipped_chunks: int = 0  # too long to count

    def add(self, other: TextTotals) -> None:
        """Add another's numbers to these."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def require_starts(starts: int, documents: int, num_bytes: int, done: str = "counted") -> None:
    """Check that a text has a shared token boundary.

    Raises:
        XtokError: if it has none.
    """
    if not starts:
        raise XtokError(
            f"nothing can be {done}: {plural(documents, 'document')}, {num_bytes:,} bytes of text",
            hint="give text, not empty, that both tokenizers can spell; xtok align shows how they "
            "differ",
        )


class CountedText(NamedTuple):
    """Counts that can be sent and merged: of the counted and of the held-out documents."""

    counted: Counts
    held: Counts
    totals: TextTotals


def merge_counts(parts: Iterable[CountedText]) -> CountedText:
    """Add up counts; integers, so that neither order nor grouping matters."""
    counted, held, totals = Tally("both"), Tally("both"), TextTotals()
    for part in parts:
        counted.add_counts(part.counted)
        held.add_counts(part.held)
        totals.add(part.totals)
    return CountedText(counted.counts(), held.counts(), totals)


class TextCounter:
    """Counts pairs and chunks over batches of documents.

    Args:
        encoder: the two tokenizers.
        target: what is counted, as in `BuildConfig`.
        hold_out: count one document in sixteen, chosen by its content, apart.
    """

    def __init__(self, encoder: TextEncoder, target: Target, hold_out: bool) -> None:
        self.encoder, self.hold_out = encoder, hold_out
        self.counted, self.held, self.totals = Tally(target), Tally(target), TextTotals()

    def add(self, batch: EncodedBatch) -> None:
        """Count documents."""
        is_held = np.zeros(len(batch.texts), np.bool_)
        if self.hold_out:
            for place, text in enumerate(batch.texts):
                digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
                is_held[place] = int.from_bytes(digest, "little") % HELD_OUT == 0
        self.totals.held_out += int(is_held.sum())
        for chosen, tally in ((~is_held, self.counted), (is_held, self.held)):
            student, teacher = (side.of(chosen) for side in batch.sides)
            boundaries = self.encoder.boundaries(student, teacher)
            skipped = tally.add(student, teacher, boundaries)
            texts = [text for text, is_chosen in zip(batch.texts, chosen, strict=True) if is_chosen]
            num_bytes, lost_bytes = boundaries.bytes_of(texts)
            self.totals.add(
                TextTotals(
                    documents=len(texts),
                    differing=boundaries.num_differing,
                    num_bytes=num_bytes,
                    lost_bytes=lost_bytes,
                    student_tokens=student.num_tokens,
                    teacher_tokens=teacher.num_tokens,
                    starts=len(boundaries.s_starts),
                    skipped_chunks=skipped,
                )
            )

    def result(self) -> CountedText:
        """Return the counts so far."""
        return CountedText(self.counted.counts(), self.held.counts(), replace(self.totals))


@dataclass(frozen=True, kw_only=True)
class CountingPlan:
    """What to count: the same plan gives the same counts, wherever they are made."""

    sources: tuple[TextSource, ...]  # for the map's history
    shards: tuple[TextShard, ...]  # all of them, in order
    target: Target
    hold_out: bool  # some documents, to choose alpha on
    digests: tuple[str, str]  # of student and teacher, from `digest_of`
    sha256: str  # of the tokenizers, the files' contents and the options


def plan_counting(
    student: Tokenizer,
    teacher: Tokenizer,
    texts: str | Path | Sequence[str | Path],
    config: BuildConfig | None = None,
    field: str = "text",
) -> CountingPlan:
    """Read every file once for its digest, and cut it into shards.

    Raises:
        XtokError: if a text cannot be found or read.
    """
    config = config or BuildConfig()
    paths = find_texts(texts)
    sources = tuple(map(describe_text, paths))
    digests = (digest_of(student), digest_of(teacher))
    identity = {
        "tokenizers": digests,
        "sources": [asdict(source) for source in sources],
        "field": field,
        "target": config.target,
        "hold_out": config.alpha is None,
    }
    return CountingPlan(
        sources=sources,
        shards=tuple(shard for path in paths for shard in shards(path, field)),
        target=config.target,
        hold_out=config.alpha is None,
        digests=digests,
        sha256=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
    )


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


def count_text(
    plan: CountingPlan,
    student: Tokenizer,
    teacher: Tokenizer,
    *,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60.0,
    num_threads: int | None = None,
    progress: TextProgress = silent_texts,
    resumed: Callable[[float], object] | None = None,
    stopping: Callable[[], bool] | None = None,
) -> CountedText:
    """Count a plan on this machine, from its checkpoint if one exists.

    Args:
        plan: made for these tokenizers.
        student: the tokenizer of the rows.
        teacher: the tokenizer of the columns.
        checkpoint: the file to save counts in; the result is the same with and without.
        checkpoint_seconds: how often to save, in seconds.
        num_threads: threads that encode; one per available core if None.
        progress: called with the bytes on disk.
        resumed: called with the share of the text that an existing checkpoint covers.
        stopping: asked after each batch; if true, the counts are saved, and counting ends.

    Raises:
        XtokError: if a text cannot be read, or the checkpoint is of another run.
        KeyboardInterrupt: if `stopping` returned true.
    """
    total = sum(shard.size for shard in plan.shards)
    last_saved = time.monotonic()
    place = Place()
    with TextEncoder(student, teacher, num_threads=num_threads) as encoder:
        counter = TextCounter(encoder, plan.target, plan.hold_out)
        if checkpoint is not None and checkpoint.exists():
            counts, place = _load_checkpoint(checkpoint, plan)
            counter.counted.add_counts(counts.counted)
            counter.held.add_counts(counts.held)
            counter.totals.add(counts.totals)
            if resumed is not None:
                resumed(place.consumed / max(1, total))
        with progress("counting", total) as advance:
            advance(place.consumed, counter.totals.student_tokens)
            for batch in encoder.read(plan.shards, advance, place):
                counter.add(batch)
                place = batch.end
                stops = stopping is not None and stopping()
                is_due = stops or time.monotonic() > last_saved + checkpoint_seconds
                if checkpoint is not None and is_due:
                    _save_checkpoint(checkpoint, plan, counter.result(), place)
                    last_saved = time.monotonic()
                if stops:
                    raise KeyboardInterrupt
    return counter.result()


def count_shard(shard: TextShard, encoder: TextEncoder, plan: CountingPlan) -> CountedText:
    """Count one shard of a plan; the counts of all, merged, are those of `count_text`.

    Raises:
        XtokError: if the text cannot be read.
    """
    counter = TextCounter(encoder, plan.target, plan.hold_out)
    for batch in encoder.read([shard]):
        counter.add(batch)
    return counter.result()


def _save_checkpoint(path: Path, plan: CountingPlan, counts: CountedText, place: Place) -> None:
    about = {"plan": plan.sha256, "place": place, "totals": asdict(counts.totals)}
    parts = {"counted": counts.counted, "held": counts.held}
    arrays = {f"{part}_{n}": a for part, of in parts.items() for n, a in of._asdict().items()}
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)


# What NumPy, zipfile and json raise for a damaged file; RuntimeError for one that is marked as
# encrypted or compressed by another method.
_DAMAGE = (ValueError, KeyError, TypeError, EOFError, OSError, RuntimeError, zipfile.BadZipFile)


def _load_checkpoint(path: Path, plan: CountingPlan) -> tuple[CountedText, Place]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            about = json.loads(saved["about"].tobytes())
            counted, held = (
                Counts(*(saved[f"{part}_{name}"] for name in Counts._fields))
                for part in ("counted", "held")
            )
        if about["plan"] != plan.sha256:
            raise XtokError(
                f"the checkpoint {path} is of another run: other texts, tokenizers or options",
                hint=f"delete it to start again: rm {path}",
            )
        totals, place = TextTotals(**about["totals"]), Place(*about["place"])
        return CountedText(counted, held, totals), place
    except _DAMAGE as error:
        raise XtokError(
            f"the checkpoint {path} cannot be read: {error}",
            hint=f"delete it to start again: rm {path}",
        ) from error
