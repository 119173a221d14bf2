"""`estimate`: a map counted on text that both tokenizers have encoded."""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtok import mapfile
from xtok.config import EstimateConfig, MultitokenConfig, Target
from xtok.cooccurrence import (
    LONGEST_CHUNK,
    PairCounts,
    PairEncoder,
    Side,
    batches,
    edge_keys,
    pair_edges,
    pair_keys,
    unit_of,
)
from xtok.errors import XtokError
from xtok.io import replacing
from xtok.progress import Progress, TextProgress, silent, silent_texts
from xtok.projection import Edges, ProjectionMap, RowKind, StageReport, heaviest, sum_duplicates
from xtok.sides import with_vocabularies
from xtok.stages import (
    finished,
    history_with,
    multitoken,
    reapply_exact,
    reported,
    stage_report,
)
from xtok.texts import ShardReader, TextShard, TextSource, describe_text, find_texts, shards
from xtok.tokenizers import Tokenizer, as_tokenizer
from xtok.tokens import plural

HELD_OUT = 16
"""One document in so many is held out to choose alpha on."""

ALPHAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""What alpha is chosen from."""

EPSILON = 1e-3
"""The share of a uniform distribution in a cross-entropy, so that it is finite."""


_PROBE = (
    "I'LL say:\r\n\n\tif x1 == 12345:  # don't\n        Straße, cafe\u0301, ﬁn … "
    "天気は三つ目 １２３ <s>\n"
)


@dataclass
class TextTotals:
    """What was read, and how much of it both sides spell alike; integers that add up.

    Attributes:
        documents: documents read.
        held_out: those of them that alpha was chosen on.
        differing: documents on which the two sides stop spelling the same bytes.
        num_bytes: bytes of text.
        lost_bytes: bytes behind the first difference of a document.
        student_tokens: the student's tokens.
        teacher_tokens: the teacher's.
        starts: bytes at which a token begins on both sides.
        skipped_chunks: chunks too long to count (where chunks are counted).
    """

    documents: int = 0
    held_out: int = 0
    differing: int = 0
    num_bytes: int = 0
    lost_bytes: int = 0
    student_tokens: int = 0
    teacher_tokens: int = 0
    starts: int = 0
    skipped_chunks: int = 0

    def add(self, other: TextTotals) -> None:
        """Add another's numbers to these."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class CountedText(NamedTuple):
    """Counts as arrays that can be sent and merged: of the counted and of the held-out documents.

    `keys` and `held_keys` are `student_id << 32 | teacher_id`, int64, in rising order.
    """

    keys: NDArray[np.int64]
    counts: NDArray[np.int64]
    held_keys: NDArray[np.int64]
    held_counts: NDArray[np.int64]
    totals: TextTotals


def merge_counts(parts: Iterable[CountedText]) -> CountedText:
    """Add up counts; integers, so that neither order nor grouping matters."""
    counted, held, totals = PairCounts(), PairCounts(), TextTotals()
    for part in parts:
        counted.add(part.keys, part.counts)
        held.add(part.held_keys, part.held_counts)
        totals.add(part.totals)
    return CountedText(*counted.arrays(), *held.arrays(), totals)


class TextCounter:
    """Counts pairs over batches of documents.

    Args:
        encoder: the two tokenizers.
        target: what is counted, as in `EstimateConfig`.
        hold_out: count one document in sixteen, by its content, apart.
    """

    def __init__(self, encoder: PairEncoder, target: Target, hold_out: bool) -> None:
        self.encoder, self.target, self.hold_out = encoder, target, hold_out
        self.counted, self.held, self.totals = PairCounts(), PairCounts(), TextTotals()

    def add(self, texts: Sequence[str]) -> None:
        """Count documents."""
        is_held = [self.hold_out and _is_held_out(text) for text in texts]
        kept = [text for text, apart in zip(texts, is_held, strict=True) if not apart]
        held = [text for text, apart in zip(texts, is_held, strict=True) if apart]
        sides = self.encoder.encode([*kept, *held])
        self._add(kept, [side.documents(0, len(kept)) for side in sides], self.counted)
        self._add(held, [side.documents(len(kept), len(texts)) for side in sides], self.held)
        self.totals.held_out += len(held)

    def _add(self, texts: Sequence[str], sides: Sequence[Side], counts: PairCounts) -> None:
        student, teacher = sides
        starts = self.encoder.starts(student, teacher)
        keys, amounts, skipped = pair_keys(student, teacher, starts, self.target)
        counts.add(keys, amounts)
        num_bytes, lost_bytes = starts.bytes_of(texts)
        self.totals.add(
            TextTotals(
                documents=len(texts),
                differing=starts.num_differing,
                num_bytes=num_bytes,
                lost_bytes=lost_bytes,
                student_tokens=student.num_tokens,
                teacher_tokens=teacher.num_tokens,
                starts=len(starts.s_starts),
                skipped_chunks=skipped,
            )
        )

    def result(self) -> CountedText:
        """Return what was counted so far."""
        return CountedText(*self.counted.arrays(), *self.held.arrays(), replace(self.totals))

    def restore(self, counts: CountedText) -> None:
        """Go on from what was counted before."""
        self.counted.add(counts.keys, counts.counts)
        self.held.add(counts.held_keys, counts.held_counts)
        self.totals.add(counts.totals)


def _is_held_out(text: str) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT == 0


@dataclass(frozen=True, kw_only=True)
class CountingPlan:
    """What is to be counted: the same plan gives the same counts, wherever they are made.

    Attributes:
        sources: the text files, for the record.
        shards: all their shards, in order.
        target: as in `EstimateConfig`.
        hold_out: whether documents are held out to choose alpha on.
        digests: of the student and of the teacher, from `digest_of`.
        sha256: a digest of the tokenizers, the files' contents and the options.
    """

    sources: tuple[TextSource, ...]
    shards: tuple[TextShard, ...]
    target: Target
    hold_out: bool
    digests: tuple[str, str]
    sha256: str


def plan_counting(
    student: Tokenizer,
    teacher: Tokenizer,
    texts: Sequence[str | Path],
    config: EstimateConfig | None = None,
) -> CountingPlan:
    """Read every file once for its digest, and cut it into shards.

    Raises:
        XtokError: if a text cannot be found or read.
    """
    config = config or EstimateConfig()
    paths = find_texts(texts)
    sources = tuple(map(describe_text, paths))
    parts = tuple(shard for path in paths for shard in shards(path, config.field))
    digests = (digest_of(student), digest_of(teacher))
    identity = {
        "tokenizers": digests,
        "sources": [asdict(source) for source in sources],
        "field": config.field,
        "target": config.target,
        "hold_out": config.alpha is None,
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    return CountingPlan(
        sources=sources,
        shards=parts,
        target=config.target,
        hold_out=config.alpha is None,
        digests=digests,
        sha256=digest.hexdigest(),
    )


def digest_of(tokenizer: Tokenizer) -> str:
    """Return a digest of a tokenizer's tokens, and of how it cuts a text into them.

    Equal tables may come with another split pattern or normalizer.
    """
    found = [tokenizer.table.sha256(), *map(list, tokenizer.library_ids([_PROBE]))]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


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
    """Count what a plan says, on this machine; go on from a checkpoint that is there.

    Args:
        plan: of these tokenizers.
        student: the tokenizer of the rows.
        teacher: the tokenizer of the columns.
        checkpoint: where counts are saved every so often; the result is the same with and without.
        checkpoint_seconds: how often, in seconds.
        num_threads: threads that encode; as many as there are cores if None.
        progress: called with the bytes on disk.
        resumed: called with the share of the text that a checkpoint has, if there is one.
        stopping: asked after each batch; if true, the counts are saved, and counting ends.

    Raises:
        XtokError: if a text is none, or the checkpoint is of another run.
        KeyboardInterrupt: if `stopping` said so.
    """
    with PairEncoder(student, teacher, num_threads) as encoder:
        counter = TextCounter(encoder, plan.target, plan.hold_out)
        place = _Place(0, 0, 0)
        if checkpoint is not None and checkpoint.exists():
            counts, place = _load_checkpoint(checkpoint, plan)
            counter.restore(counts)
            if resumed is not None:
                resumed(place.consumed / max(1, sum(shard.size for shard in plan.shards)))
        last_saved = time.monotonic()
        for done in _count_from(plan, counter, place, progress):
            stops = stopping is not None and stopping()
            is_due = stops or time.monotonic() > last_saved + checkpoint_seconds
            if checkpoint is not None and is_due:
                _save_checkpoint(checkpoint, plan, counter.result(), done)
                last_saved = time.monotonic()
            if stops:
                raise KeyboardInterrupt
    return counter.result()


class _Place(NamedTuple):
    """How far counting has come: documents of a shard, and bytes on disk in all."""

    shard: int
    documents: int
    consumed: int


def _count_from(
    plan: CountingPlan, counter: TextCounter, place: _Place, progress: TextProgress
) -> Iterator[_Place]:
    """Count what follows a place; tell the place after each batch."""
    first, skip, read = place
    sizes = [shard.size for shard in plan.shards]
    with progress("counting", sum(sizes)) as advance:
        advance(read, counter.totals.student_tokens)
        for number in range(first, len(plan.shards)):
            reader = ShardReader(plan.shards[number])
            done, before = skip, sum(sizes[:number])
            for batch in batches(islice(reader, skip, None)):
                tokens = counter.totals.student_tokens
                counter.add(batch)
                done += len(batch)
                now = before + reader.consumed
                advance(now - read, counter.totals.student_tokens - tokens)
                read = now
                yield _Place(number, done, read)
            advance(before + sizes[number] - read, 0)
            read = before + sizes[number]
            skip = 0
            yield _Place(number + 1, 0, read)


def count_shard(
    shard: TextShard, encoder: PairEncoder, target: Target, hold_out: bool
) -> CountedText:
    """Count one shard; the counts of all shards, merged, are those of `count_text`.

    Raises:
        XtokError: if the text is none.
    """
    counter = TextCounter(encoder, target, hold_out)
    for batch in batches(ShardReader(shard)):
        counter.add(batch)
    return counter.result()


def _save_checkpoint(path: Path, plan: CountingPlan, counts: CountedText, place: _Place) -> None:
    about = {"plan": plan.sha256, "place": place, "totals": asdict(counts.totals)}
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            about=np.frombuffer(json.dumps(about).encode(), np.uint8),
            keys=counts.keys,
            counts=counts.counts,
            held_keys=counts.held_keys,
            held_counts=counts.held_counts,
        )


# What numpy, zipfile and json raise of a damaged file; a RuntimeError of one that says it is
# encrypted, or compressed in a way of its own.
_DAMAGE = (ValueError, KeyError, TypeError, EOFError, OSError, RuntimeError, zipfile.BadZipFile)


def _load_checkpoint(path: Path, plan: CountingPlan) -> tuple[CountedText, _Place]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            about = json.loads(found["about"].tobytes())
            arrays = [found[n] for n in ("keys", "counts", "held_keys", "held_counts")]
        if about["plan"] != plan.sha256:
            raise XtokError(
                f"the checkpoint {path} is of another run: other texts, tokenizers or options",
                hint=f"delete it to begin anew (rm {path}), or give another --checkpoint",
            )
        place = _Place(*about["place"])
        totals = TextTotals(**about["totals"])
        return CountedText(arrays[0], arrays[1], arrays[2], arrays[3], totals), place
    except _DAMAGE as error:
        raise XtokError(
            f"the checkpoint {path} cannot be read: {error}",
            hint=f"delete it to begin anew: rm {path}",
        ) from error


def smooth(counted: Edges, base: Edges, alpha: float) -> Edges:
    """Return `(counts + alpha * base) / (N + alpha)` for each row, N being the row's counts.

    This is the posterior mean under a Dirichlet prior of strength alpha around the base row
    (MacKay and Peto, Natural Language Engineering 1(3), 1995). Rows without counts are the base's.

    Args:
        counted: pairs and their counts.
        base: a map's edges; each row sums to 1.
        alpha: the base's weight in counts (a pseudo-count).
    """
    weighted = base._replace(weights=alpha * base.weights.astype(np.float64))
    return sum_duplicates(Edges.concatenate([counted, weighted])).normalized()


def cross_entropy(edges: Edges, keys: NDArray[np.int64], counts: NDArray[Any], width: int) -> float:
    """Return the mean of `-ln((1 - eps) * W[s, t] + eps / width)` over counted pairs, in nats.

    Args:
        edges: the map, in any order, without duplicates.
        keys: int64, `student_id << 32 | teacher_id`.
        counts: beside them.
        width: the teacher's.
    """
    found = losses(weights_at(edges, keys), width)
    return float((found * counts).sum() / max(1, counts.sum()))


def losses(weights: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Return `-ln((1 - eps) * weight + eps / width)` of each weight, in nats."""
    found: NDArray[np.float64] = -np.log((1 - EPSILON) * weights + EPSILON / width)
    return found


def weights_at(edges: Edges, keys: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the weight of each pair `student_id << 32 | teacher_id`, 0 where there is none."""
    own = edge_keys(edges)
    order = np.argsort(own)
    own, weights = own[order], edges.weights[order].astype(np.float64)
    if not len(own):
        return np.zeros(len(keys))
    place = np.searchsorted(own, keys).clip(0, len(own) - 1)
    return np.where(own[place] == keys, weights[place], 0.0)


def choose_alpha(counts: CountedText, base: Edges, top_k: int, width: int, unit: int = 1) -> float:
    """Return the alpha whose map, cut to `top_k`, predicts the held-out documents best.

    The smallest of equally good ones; 4 where nothing was held out.
    """
    if not len(counts.held_keys):
        return 4.0
    counted = pair_edges(counts.keys, counts.counts / unit)
    found = [
        cross_entropy(
            heaviest(smooth(counted, base, alpha), top_k),
            counts.held_keys,
            counts.held_counts,
            width,
        )
        for alpha in ALPHAS
    ]
    return ALPHAS[int(np.argmin(found))]


def estimate(
    student_model: str | PathLike[str] | Tokenizer,
    teacher_model: str | PathLike[str] | Tokenizer,
    texts: Sequence[str | Path],
    config: EstimateConfig | None = None,
    *,
    base: ProjectionMap | None = None,
    checkpoint: Path | None = None,
    count: Callable[[CountingPlan], CountedText] | None = None,
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
) -> ProjectionMap:
    """Count a map on text: how likely teacher token t is where student token s begins.

    `W[s, t] = (count(s, t) + alpha * base[s, t]) / (count(s) + alpha)`, cut to `top_k`. What is
    counted depends on `config.target`. Counts are integers to the end, so that the result depends
    on the texts alone, not on how they were read or interrupted.

    Args:
        student_model: the model of the rows, as `build` takes it.
        teacher_model: the model of the columns, likewise.
        texts: paths and globs of plain text, JSON lines or Parquet, gzip and zstd included.
        config: the options; the defaults if None.
        base: a map of this pair that is smoothed towards, its slots left out; one of the
            vocabularies alone (`multitoken` with the weights `prior`, and this target) if None.
        checkpoint: a file where counts are saved every minute; if it is there, counting goes on
            from it. It is removed at the end.
        count: counts a plan in another way, such as on a cluster, without `checkpoint` and
            `text_progress`; `count_text` if None.
        progress: called for each pass over a vocabulary.
        text_progress: called for the text.

    Raises:
        XtokError: if a text cannot be read, nothing in it can be counted, or the base or the
            checkpoint is of something else.
    """
    config = config or EstimateConfig()
    student, teacher = as_tokenizer(student_model), as_tokenizer(teacher_model)
    if base is not None:
        base = with_vocabularies(
            base, student=student.vocabulary, teacher=teacher.vocabulary, widths=True
        )
    plan = plan_counting(student, teacher, texts, config)
    if base is None:  # first, so that an interruption after hours of counting loses nothing
        options = MultitokenConfig(weights="prior", target=config.target, scale_trick=False)
        base = multitoken(student, teacher, options, progress=progress)
    if count is None:
        counts = count_text(plan, student, teacher, checkpoint=checkpoint, progress=text_progress)
    else:
        counts = count(plan)
    result = map_of_counts(counts, base, plan, config)
    if checkpoint is not None and count is None:
        checkpoint.unlink(missing_ok=True)
    return result


def map_of_counts(
    counts: CountedText, base: ProjectionMap, plan: CountingPlan, config: EstimateConfig
) -> ProjectionMap:
    """Smooth counts towards a base map, and cut: the end of `estimate`.

    Raises:
        XtokError: if there is nothing to count.
    """
    totals = counts.totals
    if not totals.starts:
        raise XtokError(
            f"nothing can be counted: {plural(totals.documents, 'document')}, "
            f"{totals.num_bytes:,} bytes of text",
            hint="give text, not empty, that both tokenizers can spell; xtok align shows how they "
            "differ",
        )
    unit = unit_of(plan.target)
    towards = base.edges.take(~base.is_slot).normalized()
    alpha = config.alpha
    if alpha is None:
        alpha = choose_alpha(counts, towards, config.top_k, base.shape[1], unit)
    counted = pair_edges(
        np.concatenate([counts.keys, counts.held_keys]),
        np.concatenate([counts.counts, counts.held_counts]) / unit,
    )
    kind = base.row_kind.copy()
    kind[counted.student_ids] = RowKind.COUNTED
    step = {
        "stage": "estimate",
        "options": {"top_k": config.top_k, "target": config.target, "alpha": alpha},
        "initial_sha256": mapfile.sha256(base),
        "texts": [asdict(source) for source in plan.sources],
        "counted": asdict(totals),
    }
    result = finished(
        heaviest(smooth(counted, towards, alpha), config.top_k),
        student=base.student,
        teacher=base.teacher,
        row_kind=kind,
        scale_slot=None,
        method="estimate",
        top_k=config.top_k,
        history=history_with(base, step),
        reports=base.reports,
    )
    result = reported(result, _report(result, totals, alpha, config))
    return reapply_exact(result) if config.pin_exact else result


def _report(
    projection: ProjectionMap, totals: TextTotals, alpha: float, config: EstimateConfig
) -> StageReport:
    notes = [
        f"{plural(totals.documents, 'document')}, {totals.student_tokens:,} student and "
        f"{totals.teacher_tokens:,} teacher tokens, {totals.starts:,} shared token boundaries"
    ]
    if config.alpha is None and totals.held_out:
        notes.append(f"alpha {alpha:g}, chosen on {plural(totals.held_out, 'held-out document')}")
    elif config.alpha is None:
        notes.append(f"alpha {alpha:g}: the text has too few documents to choose it on")
    if totals.differing:
        share = totals.lost_bytes / max(1, totals.num_bytes)
        notes.append(
            f"the tokenizers disagree on {plural(totals.differing, 'document')} (normalization); "
            f"each was counted up to that point, skipping {share:.1%} of the text"
        )
    if totals.skipped_chunks:
        notes.append(
            f"{totals.skipped_chunks:,} chunks of more than {LONGEST_CHUNK} tokens left out"
        )
    return stage_report("estimate", projection, notes)
