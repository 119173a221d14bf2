"""`project`: files of a teacher's predictions in, a file of a student's out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xtok._lib.io import atomic_output, locked, remove, write
from xtok._lib.opening import need, parquet_writer
from xtok._lib.progress import Note, Progress, silent, silent_note
from xtok._lib.ragged import offsets_of
from xtok._lib.shards import Paths
from xtok.config import WAIT, ProjectConfig
from xtok.errors import OutputError, XtokError
from xtok.maps import file as mapfile
from xtok.maps.map_arguments import MapLike
from xtok.teachers.back_map import bind_back_map, kept_back_map
from xtok.teachers.checkpoint import (
    ProjectJob,
    Totals,
    holding,
    make_part,
    one_schema,
    recipe_of_parts,
    tables_of,
)
from xtok.teachers.formats import distillkit, neutral
from xtok.teachers.formats.caches import WRITERS, Cache, find_caches, open_cache, read_cache
from xtok.teachers.formats.checks import is_renormalized
from xtok.teachers.formats.columns import Target
from xtok.teachers.formats.documents import PROJECTED, Documents, cache_error
from xtok.teachers.stored_texts import notes_on
from xtok.teachers.translator import Templates, Translator
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.display import percent
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.roles import slot_candidates

if TYPE_CHECKING:
    from xtok.teachers.cluster import TokenizerSource

_FIRST_LOOK = 1 << 16
"""Candidates of each file that are checked before any work."""

CANDIDATES_PER_GROUP = 1 << 20
"""Candidates of a row group whose rows are padded to one width: some 40 MB while it is made."""

MAX_LIST_LENGTH = (1 << 31) - 1
"""What a list of Arrow holds at most."""

_PARQUET = {"use_dictionary": False, "compression": "zstd", "compression_level": 1}
"""Dictionaries of ids and log-probabilities make files no smaller, and take half the time."""


@dataclass(frozen=True, kw_only=True)
class Projected:
    """What `project` did: the file that it wrote, and what the predictions in it are worth."""

    paths: tuple[str, ...]
    student: str
    teacher: str
    documents: int
    teacher_tokens: int
    student_tokens: int
    first_tokens: int  # of them those that begin a text, which nothing predicts
    targets: int  # student tokens with a prediction
    mean_rest: float | None  # of them; None where the teacher's candidates were renormalized
    teacher_bits_per_byte: float | None  # of the text
    teacher_is_bound: bool  # whether that is at least so much: some tokens were not candidates
    notes: tuple[str, ...] = ()

    @property
    def sentences(self) -> list[str]:
        """The report for people, a line each."""
        tokens = self.student_tokens - self.first_tokens
        share = percent(self.targets / max(1, tokens))
        rest = "not known" if self.mean_rest is None else percent(self.mean_rest)
        lines = [
            f"{self.documents:,} documents; {self.targets:,} of {tokens:,} student tokens have a "
            f"target ({share}), not counting {self.first_tokens:,} that begin a text; mean rest: "
            f"{rest}"
        ]
        if self.teacher_bits_per_byte is not None:
            least = "at least " * self.teacher_is_bound
            lines.append(
                f"bits per byte of this text, by the teacher: {least}"
                f"{self.teacher_bits_per_byte:.3f}"
            )
        return lines


def project(
    teacher_topk: Paths,
    pair: Pair,
    output: str | Path,
    config: ProjectConfig | None = None,
    *,
    back_map: MapLike | None = None,
    student_template: str | Path | None = None,
    teacher_template: str | Path | None = None,
    sources: Sequence[TokenizerSource] = (),
    address: str | None = "auto",
    progress: Progress = silent,
    text_progress: Progress = silent,
    note: Note = silent_note,
) -> Projected:
    """Turn stored predictions of a teacher into predictions of a student, on the same text.

    Memory does not depend on the size of the files. Parts are kept in a folder next to the output
    until it is written; a run that failed or was killed goes on from them, and gives the same
    bytes.

    Args:
        teacher_topk: a path or glob, or several: Parquet or lines of JSON, also compressed.
        pair: the student and the teacher whose ids the files have, with their tokenizers.
        output: `.parquet`, or `.jsonl` for vLLM's answers.
        config: the options; the defaults if None.
        back_map: a map from the teacher (rows) to the student (columns), or its path; by default
            one is built, and kept in the cache folder.
        student_template: of conversations, as `conversation.render` takes it.
        teacher_template: the same for the teacher's side.
        sources: what the nodes of a Ray cluster load both tokenizers from; then they do the work.
        address: the cluster's, as `ray.init` takes it.
        progress: called for each pass over a vocabulary.
        text_progress: called for the files.
        note: called with a sentence on what was assumed, what was there already, and what is kept.

    Raises:
        XtokError: if a file cannot be read, is of another tokenizer, or holds what is no
            prediction; if the map is of another pair; if the output cannot be written, or another
            run writes it.
    """
    config = ProjectConfig.or_default(config)
    paths, target = find_caches(teacher_topk, output, config)
    pair, given = (pair, None) if back_map is None else bind_back_map(pair, back_map, note)
    beside: tuple[Path, bytes] | None = None
    if config.to == "distillkit":
        content = distillkit.config_for(pair.student.vocab_size, config.top_k)
        beside = target.with_name(distillkit.CONFIG), content.encode()
        _check_beside(*beside)
    templates = student_template, teacher_template
    inputs = _opened(paths, config, pair, templates, note)
    projection = given or kept_back_map(pair, progress, note)
    stamps = _stamps(paths)
    job = ProjectJob(
        recipe=recipe_of_parts(pair, inputs, mapfile.sha256(projection), config, templates),
        shards=tuple((cache, shard) for cache in inputs for shard in cache.shards),
        back_map=projection,
        config=config,
        templates=templates,
        folder=target.with_name(f"{target.name}.checkpoint"),
    )
    with ExitStack() as held:
        held.enter_context(holding(job, target, note))
        if beside is not None:
            held.enter_context(_holding_beside(*beside, note))
        if sources:
            from xtok.teachers.cluster import make_parts_on_ray

            parts = make_parts_on_ray(job, sources, address, text_progress)
        else:
            translator = Translator(pair, projection, templates=templates)
            with text_progress("projecting", job.size) as advance:
                parts = [make_part(job, n, translator, advance) for n in range(len(job.shards))]
        for path, stamp in _stamps(paths).items():
            if stamp != stamps[path]:
                hint = (
                    f"when it is written, delete the parts and start again: rm {job.folder}/*.part"
                )
                raise cache_error(path, "it changed while it was read", hint)
        _write(job, target, pair, one_schema([part.schema for part in parts]))
    totals = Totals()
    for part in parts:
        totals.add(part.totals)
    return Projected(
        paths=(os.fspath(target),),
        student=pair.student.model_id,
        teacher=pair.teacher.model_id,
        documents=totals.documents,
        teacher_tokens=totals.teacher_tokens,
        student_tokens=totals.positions,
        first_tokens=totals.firsts,
        targets=totals.targets,
        mean_rest=totals.rest / totals.rests if totals.rests else None,
        teacher_bits_per_byte=totals.bits / totals.num_bytes if totals.num_bytes else None,
        teacher_is_bound=totals.bounded > 0,
        notes=() if totals.targets else ("no student token has a prediction",),
    )


def _stamps(paths: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Return what changes when files are written: their sizes and times."""
    stats = {path: path.stat() for path in paths}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def _opened(
    paths: Sequence[Path],
    config: ProjectConfig,
    pair: Pair,
    templates: Templates,
    note: Note,
) -> tuple[Cache, ...]:
    """Open caches, and check them, as far as their first rows tell."""
    opened, columns = [], []
    for path in paths:
        cache = open_cache(path, config.source)
        _check_digest(cache, pair)
        pieces = (rows for s in cache.shards for rows, _ in read_cache(cache, s, _FIRST_LOOK))
        first = next(pieces, None)
        if first is not None:
            _check_first(cache, first, pair)
            if "normalized" not in cache.about and is_renormalized(first.topk, pair.teacher):
                note(
                    f"{path}: its probabilities sum to 1 in each row, so they are renormalized "
                    "over the candidates: the rest is not known, and none is written"
                )
                cache = replace(cache, looks_renormalized=True)
            for text in notes_on(first, pair, templates):
                note(f"{path}: {text}")
            columns.append(neutral.table(first).schema)
            if config.to == "vllm":
                _check_json(path, columns[-1])
        opened.append(cache)
    if not columns:
        raise XtokError("the files hold no rows", hint="give a cache that has some")
    if len({cache.renormalized for cache in opened}) > 1:
        raise XtokError(
            "only some of the files are renormalized",
            hint="project them one by one",
        )
    one_schema(columns)
    return tuple(opened)


def _check_digest(cache: Cache, pair: Pair) -> None:
    """Check the digest of a cache's tokenizer, if it has one."""
    digest, (student, teacher) = cache.about.get("tokenizer_sha256"), pair.tables
    if digest in (None, teacher.sha256()):
        return
    if digest == student.sha256():
        raise _swapped(cache.path, pair)
    raise cache_error(
        cache.path,
        f"its ids are of {cache.about.get('tokenizer', 'another tokenizer')}, whose tokens are not "
        f"those of {pair.teacher.model_id}",
        "give the model whose predictions these are",
    )


def _check_first(cache: Cache, rows: Documents, pair: Pair) -> None:
    """Check the first rows of a cache, and whether they are the student's."""
    student, teacher = pair.tokenizers
    if _spells(student, rows) and not _spells(teacher, rows):
        raise _swapped(cache.path, pair)
    try:
        cache.check(rows, teacher.vocabulary)
    except XtokError as error:
        if _has_ids(teacher, rows) or not _has_ids(student, rows):
            raise
        hint = "give the student first, then the teacher whose predictions these are: "
        hint += f"{pair.student.model_id} has all their ids"
        raise XtokError(error.message, hint=hint) from error


def _has_ids(tokenizer: Tokenizer, rows: Documents) -> bool:
    width = len(tokenizer.table)
    return all(((ids >= 0) & (ids < width)).all() for ids in (rows.topk.token_ids, rows.topk.ids))


def _spells(tokenizer: Tokenizer, rows: Documents) -> bool:
    """Whether the first row's ids are a tokenizer's, and spell its text."""
    [text, *_] = rows.values("text")
    if text is None or not _has_ids(tokenizer, rows):
        return False
    ids = rows.topk.token_ids[: rows.topk.bounds[1]]
    spelled = b"".join(tokenizer.table[i] for i in ids.tolist())
    return spelled.strip() == str(text).encode("utf-8", "replace").strip()


def _swapped(path: Path, pair: Pair) -> XtokError:
    student, teacher = pair.student.model_id, pair.teacher.model_id
    return cache_error(
        path,
        f"the sides are swapped: its ids are those of {student}, and {teacher} was given as the "
        "teacher",
        "give the student first, then the teacher whose predictions these are",
    )


def _check_json(path: Path, schema: Any) -> None:
    """Check that lines of JSON can hold all columns."""
    for column in schema:
        if not _is_json(column.type):
            raise XtokError(
                f"{path}: the column {column.name!r} is of the type {column.type}, which JSON does "
                "not have",
                hint="leave out the column, or write it as a string or a number",
            )


def _is_json(kind: Any) -> bool:
    import pyarrow

    types = pyarrow.types
    if types.is_struct(kind):
        return all(_is_json(field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_json(kind.value_type)
    plain = types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_string
    return any(is_of(kind) for is_of in (*plain, types.is_large_string))


def _write(job: ProjectJob, target: Path, pair: Pair, schema: Any) -> None:
    """Join all parts, whose tables have columns of this schema, to the output."""
    meaningless = slot_candidates(pair.tables[0])
    of_student = Target(
        model=pair.student.model_id,
        width=job.config.top_k,
        pad_id=meaningless[0] if meaningless else 0,
    )
    arrow = need("pyarrow", target)
    parts = chain.from_iterable(tables_of(job, shard) for shard in range(len(job.shards)))
    tables = (
        arrow.concat_tables([schema.empty_table(), table], promote_options="default")
        for table in parts
    )
    to = job.config.to
    if to != "neutral":
        width = 1 if to == "vllm" else job.config.top_k
        some = chain.from_iterable(_bounded(table, width) for table in tables)
        tables = (WRITERS[to](rows, of_student) for rows in some)
    if to == "vllm":
        write(target, chain.from_iterable(tables))
        return
    (cache, _), (student, teacher) = job.shards[0], pair.tables
    about = {
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
    with atomic_output(target) as temporary, temporary.open("wb") as file, ExitStack() as stack:
        writer: Any = None
        for one in tables:
            table = one.replace_schema_metadata(about)
            if writer is None:
                writer = stack.enter_context(parquet_writer(file, table.schema, **_PARQUET))
            writer.write_table(table, row_group_size=len(table) or None)


def _check_beside(path: Path, content: bytes) -> None:
    """Check that a file that all outputs of a folder share is what this one needs, if it exists."""
    if path.exists() and path.read_bytes() != content:
        raise OutputError(
            f"{path} is of other predictions, and would be replaced",
            hint="give an output in a folder of its own",
        )


@contextmanager
def _holding_beside(path: Path, content: bytes, note: Note) -> Iterator[None]:
    """Write such a file at the start, so that no other run writes another while this one works.

    A run that fails removes what it wrote, and another one that needs it writes it again.
    """
    is_ours = False

    def hold() -> None:
        nonlocal is_ours
        with locked(path, timeout=WAIT, note=note):
            _check_beside(path, content)
            if not path.exists():
                is_ours = True
                write(path, [content])

    try:
        hold()
        yield
        hold()
    except BaseException:
        if is_ours:
            remove(path.parent, [re.escape(path.name)], with_folder=False)
        raise


def _bounded(table: Any, width: int) -> Iterator[Documents]:
    """Cut rows so that their candidates, padded to one width, take bounded memory."""
    [batch] = table.combine_chunks().to_batches()
    sizes = batch.column("input_ids").value_lengths().to_numpy(zero_copy_only=False)
    if sizes.max(initial=0) * width > MAX_LIST_LENGTH:
        raise XtokError(
            f"a text of {sizes.max():,} tokens with {width:,} candidates each is more than a row "
            "of Parquet holds",
            hint="lower {option}",
            parameter="top_k",
        )
    group = offsets_of(sizes)[:-1] * width // CANDIDATES_PER_GROUP
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    for start, stop in pairwise([*starts.tolist(), len(sizes)]):
        yield neutral.read(batch.slice(start, stop - start))
