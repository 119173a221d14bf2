"""`project`: convert files of a teacher's predictions to predictions for a student."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from xtok._lib.io import atomic_output, locked, write
from xtok._lib.opening import need
from xtok._lib.parquet import parquet_writer
from xtok._lib.progress import Note, Progress, silent, silent_note
from xtok._lib.ragged import offsets_of
from xtok._lib.shards import Paths
from xtok.config import DEFAULT_TIMEOUT, ProjectConfig
from xtok.errors import OutputError, XtokError
from xtok.maps import file as mapfile
from xtok.maps.map_arguments import MapLike
from xtok.teachers import parts
from xtok.teachers.cluster import Cluster, make_parts_on_ray
from xtok.teachers.formats import distillkit, neutral
from xtok.teachers.formats.caches import WRITERS, Cache, find_caches, open_cache, read_cache
from xtok.teachers.formats.checks import is_renormalized
from xtok.teachers.formats.columns import StudentSide
from xtok.teachers.formats.documents import PROJECTED, Documents, cache_error
from xtok.teachers.formats.responses import FIELDS
from xtok.teachers.parts import PartSummary, ProjectJob, Totals
from xtok.teachers.stored_texts import notes_on
from xtok.teachers.translator import Translator, bind_back_map
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.display import percent, plural
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.roles import slot_candidates

_FIRST_LOOK = 1 << 16
"""Number of candidates of each file that are checked before the work starts."""

CANDIDATES_PER_GROUP = 1 << 20
"""Number of candidates per row group, in formats with equally many candidates in each row.

Writing a row group needs 40 MB of memory.
"""

MAX_LIST_LENGTH = (1 << 31) - 1
"""Maximum length of an Arrow list."""

_PARQUET = {"use_dictionary": False, "compression": "zstd", "compression_level": 1}
"""Options of the Parquet writer. Dictionaries would double the writing time, but save no space."""


@dataclass(frozen=True, kw_only=True)
class Projected:
    """Report of `project`: the output file, and statistics of its predictions."""

    paths: tuple[str, ...]
    student: str
    teacher: str
    documents: int
    teacher_tokens: int
    student_tokens: int
    first_tokens: int  # number of texts without a prediction for the first student token
    targets: int  # number of student tokens with a prediction
    mean_rest: float | None  # None if the teacher's candidates were renormalized
    teacher_bits_per_byte: float | None  # bits per byte of the text
    # Whether `teacher_bits_per_byte` is a lower bound, because some tokens are not candidates.
    teacher_is_bound: bool
    notes: tuple[str, ...] = ()

    @property
    def sentences(self) -> list[str]:
        """The report as sentences, one per line."""
        tokens = self.student_tokens - self.first_tokens
        share = percent(self.targets / max(1, tokens))
        rest = "unknown" if self.mean_rest is None else percent(self.mean_rest)
        lines = [
            f"{self.documents:,} documents; {self.targets:,} of {tokens:,} student tokens have a "
            f"target ({share}), not counting the first tokens of {self.first_tokens:,} texts; mean "
            f"rest: {rest}"
        ]
        if (bits := self.teacher_bits_per_byte) is not None:
            least = "at least " * self.teacher_is_bound
            lines.append(f"the teacher needs {least}{bits:.3f} bits per byte for this text")
        return lines


def project(
    teacher_topk: Paths,
    pair: Pair,
    output: str | Path,
    config: ProjectConfig | None = None,
    *,
    back_map: MapLike,
    cluster: Cluster | None = None,
    progress: Progress = silent,
    note: Note = silent_note,
) -> Projected:
    """Convert a teacher's stored predictions to predictions for a student on the same text.

    Finished parts are stored in the folder `OUTPUT.checkpoint`. After an interruption, the same
    call reuses the finished parts. The required memory does not depend on the size of the files.

    Args:
        teacher_topk: one or more paths or globs of Parquet files or JSON lines; JSON lines can be
            compressed.
        pair: the student and the teacher, with their tokenizers. The ids in the files belong to the
            teacher.
        output: a path that ends in `.parquet`, or in `.jsonl` for the format `vllm`.
        config: the options; None uses the defaults.
        back_map: a map from the teacher (rows) to the student (columns), or its path.
            `xtok.get_map(pair.reversed, config=xtok.config.BACK_MAP)` builds and caches a suitable
            map.
        cluster: a Ray cluster that does the work; None uses this process.
        progress: called while files are converted.
        note: called with messages about assumptions, the map and resumed work.

    Raises:
        XtokError: if a file is unreadable, belongs to a different tokenizer or contains invalid
            predictions, if the map belongs to a different pair, or if the output cannot be written.
    """
    config = ProjectConfig.or_default(config)
    paths, target = find_caches(teacher_topk, output, config)
    pair, projection = bind_back_map(pair, back_map, note)
    if config.to == "distillkit":
        _compression_config(target, pair, config)
    inputs, stamps = open_caches(paths, pair, config, note), _stamps(paths)
    job = ProjectJob(
        recipe=parts.parts_recipe(pair, inputs, mapfile.sha256(projection), config),
        shards=tuple((cache, shard) for cache in inputs for shard in cache.shards),
        back_map=projection,
        config=config,
        folder=target.with_name(f"{target.name}.checkpoint"),
    )
    with parts.holding(job, target, note):
        summaries = _make_parts(job, pair, cluster, progress)
        for path, stamp in _stamps(paths).items():
            if stamp != stamps[path]:
                hint = "when the file is complete, delete the parts and start again: rm "
                raise cache_error(path, "it changed during reading", f"{hint}{job.folder}/*.part")
        if config.to == "distillkit":
            with locked(target.with_name(distillkit.CONFIG), timeout=DEFAULT_TIMEOUT, note=note):
                path, content = _compression_config(target, pair, config)
                if not path.exists():
                    write(path, [content])
        _write(job, target, pair, parts.one_schema([summary.schema for summary in summaries]))
    return _report(target, pair, summaries)


def _make_parts(
    job: ProjectJob, pair: Pair, cluster: Cluster | None, progress: Progress
) -> list[PartSummary]:
    if cluster is not None:
        return make_parts_on_ray(job, cluster, progress)
    translator = Translator(pair, job.back_map, templates=job.config.templates)
    with progress("projecting", job.size) as advance:
        return [parts.make_part(job, n, translator, advance) for n in range(len(job.shards))]


def _report(target: Path, pair: Pair, summaries: Sequence[PartSummary]) -> Projected:
    totals = Totals.sum_of(summary.totals for summary in summaries)
    reported = {field.name for field in fields(Projected)}
    notes = []
    if totals.bounded and totals.targets < totals.student_tokens - totals.first_tokens:
        notes.append(
            f"{totals.bounded:,} tokens of the text are not candidates, and the cache has no "
            "realized_logprob for them; student tokens that start inside such a token have no "
            "target"
        )
    if totals.unmasked_chats:
        notes.append(
            f"{plural(totals.unmasked_chats, 'row')} with several turns could not be parsed as "
            "conversations, so all their tokens are targets; add a column with the name messages "
            "or loss_mask, or set the chat templates"
        )
    if not totals.targets:
        notes.append("no student token has a prediction")
    return Projected(
        paths=(os.fspath(target),),
        student=pair.student.model_id,
        teacher=pair.teacher.model_id,
        **{name: value for name, value in asdict(totals).items() if name in reported},
        mean_rest=totals.rest / totals.rests if totals.rests else None,
        teacher_bits_per_byte=totals.bits / totals.num_bytes if totals.num_bytes else None,
        teacher_is_bound=totals.bounded > 0,
        notes=tuple(notes),
    )


def _stamps(paths: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    stats = {path: path.stat() for path in paths}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def open_caches(
    paths: Sequence[Path], pair: Pair, config: ProjectConfig, note: Note = silent_note
) -> tuple[Cache, ...]:
    """Open caches and check their first rows. Files without rows are omitted.

    Raises:
        XtokError: if the files are not compatible caches of this teacher, or the output format does
            not support a column.
    """
    opened, columns = [], []
    for path in paths:
        cache = open_cache(path, config.source)
        pieces = (rows for s in cache.shards for rows, _ in read_cache(cache, s, _FIRST_LOOK))
        first = next(pieces, None)
        if first is not None:
            cache = _check_first(cache, first, pair, note)
            for text in notes_on(first, pair, config.templates):
                note(f"{path}: {text}")
            columns.append(neutral.table(first).schema)
            opened.append(cache)
            if config.to == "vllm":
                _check_json(path, first.columns)
    if not opened:
        raise XtokError("the files contain no rows", hint="pass a cache with at least one row")
    if len({cache.renormalized for cache in opened}) > 1:
        problem = "only some of the files contain renormalized probabilities"
        raise XtokError(problem, hint="project the files one at a time")
    parts.one_schema(columns)
    return tuple(opened)


def _check_first(cache: Cache, rows: Documents, pair: Pair, note: Note) -> Cache:
    student, teacher = pair.tokenizers
    if cache.footer.get("tokenizer_sha256") not in (None, pair.tables[1].sha256()):
        owner = cache.footer.get("tokenizer", "another tokenizer")
        problem = f"its ids belong to {owner}, but {pair.teacher.model_id} has different tokens"
        hint = "pass the model that made the predictions as the teacher"
        raise cache_error(cache.path, problem, hint)
    if _fits(student, rows) and not _fits(teacher, rows):
        names = f"{pair.student.model_id}, but not the teacher, {pair.teacher.model_id}"
        problem = f"its ids match the student, {names}; the sides may be swapped"
        hint = "pass the student first, then the teacher that made the predictions"
        raise cache_error(cache.path, problem, hint)
    cache.check(rows, teacher.vocabulary)
    if "normalized" not in cache.footer and is_renormalized(rows.topk, teacher.vocabulary):
        note(
            f"{cache.path}: the probabilities of each row sum to 1, so they were renormalized over "
            "the candidates; the probability of all other tokens is unknown, here and in the output"
        )
        cache = replace(cache, looks_renormalized=True)
    return cache


def _fits(tokenizer: Tokenizer, rows: Documents) -> bool:
    """Whether a tokenizer contains all ids, and decodes the ids of row 0 to the row's `text`.

    If the row has no `text`, only the ids are checked.
    """
    topk, width = rows.topk, len(tokenizer.table)
    if not all(((ids >= 0) & (ids < width)).all() for ids in (topk.token_ids, topk.ids)):
        return False
    [text, *_] = rows.values("text")
    spelled = tokenizer.table.spell(topk.token_ids[: topk.bounds[1]].tolist())
    return text is None or spelled.strip() == str(text).encode("utf-8", "replace").strip()


def _check_json(path: Path, columns: Mapping[str, Any]) -> None:
    for name, values in columns.items():
        if name in FIELDS:
            problem = f"the column {name!r} has the same name as a field of vLLM's responses"
            raise cache_error(path, problem, "drop or rename the column")
        if not _is_json(values.type):
            problem = f"the column {name!r} has the type {values.type}, which JSON does not support"
            hint = "drop the column, or convert it to strings or numbers"
            raise cache_error(path, problem, hint)


def _is_json(kind: Any) -> bool:
    if kind.num_fields:  # fields of a struct, or values of a list
        return all(_is_json(kind.field(i).type) for i in range(kind.num_fields))
    names = "null", "bool", "int", "uint", "halffloat", "float", "double", "string", "large_string"
    return str(kind).startswith(names)


def _tables(job: ProjectJob, pair: Pair, schema: Any) -> Iterator[Any]:
    """Yield the output in pieces: lines for the format `vllm`, tables for the other formats."""
    to, pad_id = job.config.to, next(iter(slot_candidates(pair.tables[0])), 0)
    student = StudentSide(model=pair.student.model_id, width=job.config.top_k, pad_id=pad_id)
    width = 1 if to == "vllm" else job.config.top_k
    arrow, first = need("pyarrow", job.folder), schema.empty_table()
    tables = (parts.read_tables(job, shard) for shard in range(len(job.shards)))
    for part in chain.from_iterable(tables):
        table = arrow.concat_tables([first, part], promote_options="default")
        if to == "neutral":
            yield table
        else:
            yield from (WRITERS[to](rows, student) for rows in _bound(table, width))


def _write(job: ProjectJob, target: Path, pair: Pair, schema: Any) -> None:
    pieces = _tables(job, pair, schema)
    if job.config.to == "vllm":
        write(target, chain.from_iterable(pieces))
        return
    footer = _footer(job, pair)
    with atomic_output(target) as temporary, temporary.open("wb") as file, ExitStack() as stack:
        writer: Any = None
        for piece in pieces:
            table = piece.replace_schema_metadata(footer)
            if writer is None:
                writer = stack.enter_context(parquet_writer(file, table.schema, **_PARQUET))
            writer.write_table(table, row_group_size=len(table) or None)


def _footer(job: ProjectJob, pair: Pair) -> dict[str, str]:
    (cache, _), (student, teacher), to = job.shards[0], pair.tables, job.config.to
    return {
        "format_version": str(neutral.FORMAT_VERSION),
        "convention": "T" if to == "neutral" else "N",
        "k": str(job.config.top_k),
        "temperature": "1.0",
        "log_base": "e",
        "normalized": "topk" if cache.renormalized or to == "axolotl" else "false",
        "tokenizer": pair.student.model_id,
        "tokenizer_sha256": student.sha256(),
        "vocab_size": str(pair.student.vocab_size),
        "teacher": pair.teacher.model_id,
        "teacher_sha256": teacher.sha256(),
        "map_sha256": job.recipe["map"],
        "source": PROJECTED,
    }


def _compression_config(target: Path, pair: Pair, config: ProjectConfig) -> tuple[Path, bytes]:
    """Return the path and bytes of DistillKit's config, which all outputs in a folder share."""
    path = target.with_name(distillkit.CONFIG)
    content = distillkit.config_for(pair.student.vocab_size, config.top_k).encode()
    if path.exists() and path.read_bytes() != content:
        problem = f"{path} already exists and belongs to other predictions"
        raise OutputError(problem, hint="write the output to a different folder")
    return path, content


def _bound(table: Any, width: int) -> Iterator[Documents]:
    [batch] = table.combine_chunks().to_batches()
    sizes = batch.column("input_ids").value_lengths().to_numpy(zero_copy_only=False)
    if sizes.max(initial=0) * width > MAX_LIST_LENGTH:
        raise XtokError(
            f"a text has {sizes.max():,} tokens with {width:,} candidates each, which is more than "
            "a Parquet row can hold",
            hint="lower {option}",
            parameter="top_k",
        )
    group = offsets_of(sizes)[:-1] * width // CANDIDATES_PER_GROUP
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    for start, end in pairwise([*starts.tolist(), len(sizes)]):
        yield neutral.read(batch.slice(start, end - start))
