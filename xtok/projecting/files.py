"""`project`: files of a teacher's predictions in, a file of a student's out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xtok.config import BuildConfig, ProjectConfig
from xtok.counting.checkpoint import digest_of
from xtok.counting.texts import Format, TextShard, find_texts, shards, source_of
from xtok.errors import OutputError, XtokError
from xtok.input_files import need
from xtok.io import check_output, write, writing
from xtok.maps import file as mapfile
from xtok.maps.admit import admit, at_widths_of
from xtok.maps.map_like import MapLike, as_map
from xtok.maps.projection_map import ProjectionMap
from xtok.progress import Note, Progress, TextProgress, silent, silent_note, silent_texts
from xtok.projecting import caches, distillkit
from xtok.projecting.caches import Cache, open_cache, read_cache
from xtok.projecting.rows import RowProjector
from xtok.projecting.stored import StoredRows, TopK, cache_error, checked, is_renormalized
from xtok.stages.build import build
from xtok.tokenizers import ModelLike, PairLike, Tokenizer
from xtok.tokenizers import pair as pair_of
from xtok.vocab.pair import Pair
from xtok.vocab.roles import slot_candidates
from xtok.vocab.table import TokenTable

if TYPE_CHECKING:
    from xtok.counting.ray import TokenizerSource

FORMAT_VERSION = 1

BACK_MAP = BuildConfig.for_loss("p-kl", target="start", top_k=32)
"""How a map from the teacher to the student is built, where none is given."""

_CACHES = (
    "give files of top-k log-probabilities (Parquet, or a server's answers as JSON lines), or a "
    "glob in quotes: 'cache/*.parquet'"
)
_FIRST_LOOK = 1 << 16
"""Candidates of each file that are checked before any work."""


@dataclass
class Totals:
    """What was read and projected; numbers that add up."""

    documents: int = 0
    teacher_tokens: int = 0
    positions: int = 0  # student tokens
    targets: int = 0  # of them with a prediction
    rests: int = 0  # predictions whose rest is known
    rest: float = 0.0  # their rests together
    bits: float = 0.0  # of the text, by the teacher
    num_bytes: int = 0  # of that text
    bounded: int = 0  # tokens of it that are no candidates, and so cost at least what is counted

    def add(self, other: Totals) -> None:
        """Add another's numbers to these."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def bits_per_byte(self) -> float | None:
        """What the text costs, in bits per byte; None if that is not known."""
        return self.bits / self.num_bytes if self.num_bytes else None


def text_totals(topk: TopK, table: TokenTable) -> Totals:
    """Return what the text of predictions costs by them: −log₂ of its own tokens' probabilities.

    A token that is no candidate has at most the rest.
    """
    lengths = table.lengths[topk.token_ids]
    is_known = topk.valid & (lengths > 0) & np.isfinite(topk.realized_logprob)
    is_bounded = topk.valid & (lengths > 0) & ~is_known & np.isfinite(topk.rest_logprob)
    nats = topk.realized_logprob[is_known].sum(dtype=np.float64)
    nats += topk.rest_logprob[is_bounded].sum(dtype=np.float64)
    return Totals(
        documents=len(topk.bounds) - 1,
        teacher_tokens=len(topk.token_ids),
        bits=float(-nats / np.log(2)),
        num_bytes=int(lengths[is_known | is_bounded].sum()),
        bounded=int(is_bounded.sum()),
    )


@dataclass(frozen=True, kw_only=True)
class Projected:
    """What `project` did: the file that it wrote, and what the predictions in it are worth."""

    paths: tuple[str, ...]
    student: str
    teacher: str
    documents: int
    teacher_tokens: int
    student_tokens: int
    targets: int  # student tokens with a prediction
    mean_rest: float | None  # of them; None where the teacher's candidates were renormalized
    teacher_bits_per_byte: float | None  # of the text
    teacher_is_bound: bool  # whether that is at least so much: some tokens were no candidates
    student_bits_per_byte: float | None = None
    student_is_bound: bool = False
    notes: tuple[str, ...] = ()

    @property
    def sentences(self) -> list[str]:
        """The report for people, a line each."""
        share = self.targets / max(1, self.student_tokens)
        rest = "not known" if self.mean_rest is None else f"{self.mean_rest:.1%}"
        costs = [
            f"{side} {'at least ' * is_bound}{bits:.3f}"
            for side, bits, is_bound in (
                ("the teacher", self.teacher_bits_per_byte, self.teacher_is_bound),
                ("the student", self.student_bits_per_byte, self.student_is_bound),
            )
            if bits is not None
        ]
        return [
            f"{self.documents:,} documents; {self.student_tokens:,} student tokens, "
            f"{self.targets:,} with a target ({share:.1%}); mean rest: {rest}",
            *([f"bits per byte of this text: {', '.join(costs)}"] if costs else []),
        ]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to project: the same job gives the same parts, wherever they are made."""

    caches: tuple[Cache, ...]
    shards: tuple[tuple[int, TextShard], ...]  # each with the number of its cache
    back_map: ProjectionMap
    config: ProjectConfig
    templates: Mapping[str, str | Path | None]  # by parameter of `RowProjector`
    folder: Path  # of the parts
    digests: tuple[str, str]  # of student and teacher, from `digest_of`

    def part(self, shard: int, number: int) -> Path:
        """Return the path of a part."""
        return self.folder / f"{shard:06}-{number:06}.arrow"

    def absolute(self) -> Job:
        """Make all paths absolute: workers run in another folder."""
        return replace(
            self,
            caches=tuple(replace(cache, path=cache.path.absolute()) for cache in self.caches),
            shards=tuple((n, replace(s, path=s.path.absolute())) for n, s in self.shards),
            folder=self.folder.absolute(),
        )

    def worker(self, pair: Pair, num_threads: int | None = None) -> RowProjector:
        """Return what projects this job's rows."""
        return RowProjector(
            pair,
            self.back_map,
            top_k=self.config.top_k,
            num_threads=num_threads,
            **self.templates,
        )


def project(
    teacher_topk: str | Path | Sequence[str | Path],
    student_model: PairLike,
    teacher_model: ModelLike | None,
    output: str | Path,
    config: ProjectConfig | None = None,
    *,
    back_map: MapLike | None = None,
    student_template: str | Path | None = None,
    teacher_template: str | Path | None = None,
    student_topk: str | Path | Sequence[str | Path] = (),
    sources: Sequence[TokenizerSource] = (),
    address: str | None = "auto",
    progress: Progress = silent,
    text_progress: TextProgress = silent_texts,
    note: Note = silent_note,
) -> Projected:
    """Turn stored predictions of a teacher into predictions of a student, on the same text.

    Memory does not depend on the size of the files. Parts are kept in a folder beside the output
    until it is written; a run that was killed goes on from them, and gives the same bytes.

    Args:
        teacher_topk: a path or glob, or several: Parquet or lines of JSON, also compressed.
        student_model: the student, as `load_tokenizer` takes it; or a pair.
        teacher_model: the teacher whose ids the files have; None with a pair.
        output: `.parquet`, or `.jsonl` for vLLM's answers.
        config: the options; the defaults if None.
        back_map: a map from the teacher (rows) to the student (columns), or its path; by default
            one is built.
        student_template: of conversations, as `conversation.render` takes it.
        teacher_template: the same for the teacher's side.
        student_topk: the student's own predictions on the text, to compare with the teacher's.
        sources: what the nodes of a Ray cluster load both tokenizers from; then they do the work.
        address: the cluster's, as `ray.init` takes it.
        progress: called for each pass over a vocabulary.
        text_progress: called for the files.
        note: called with a sentence on what was assumed, and on what was there already.

    Raises:
        XtokError: if a file cannot be read, is of another tokenizer, or holds what is no
            prediction; if the map is of another pair; if the output cannot be written.
    """
    config = ProjectConfig.or_default(config)
    target, paths, of_student = find_files(teacher_topk, student_topk, output, config)
    pair = pair_of(student_model, teacher_model)
    if back_map is not None:
        back_map = as_map(back_map)
        pair = at_widths_of(pair.reversed, back_map).reversed
    student, teacher = pair.tokenizers
    inputs = tuple(_opened(path, config, teacher, note) for path in paths)
    own = [_opened(path, replace(config, source=None), student, note) for path in of_student]
    if len({(cache.temperature, cache.renormalized) for cache in inputs}) > 1:
        raise XtokError(
            "the files differ in temperature, or only some are renormalized",
            hint="project them one by one",
        )
    if back_map is None:
        back_map = build(pair.reversed, config=BACK_MAP, progress=progress)
    back_map = _of_pair(back_map, pair)
    job = Job(
        caches=inputs,
        shards=tuple((n, s) for n, path in enumerate(paths) for s in shards_of(path)),
        back_map=back_map,
        config=config,
        templates={"student_template": student_template, "teacher_template": teacher_template},
        folder=target.with_name(f"{target.name}.checkpoint"),
        digests=(digest_of(student), digest_of(teacher)),
    )
    _begin(job, paths, note)
    try:
        parts = _parts(job, pair, sources, address, text_progress)
        _write(job, parts, target, student, teacher)
    except (OutputError, OSError):
        raise  # what is done is kept
    except Exception:
        shutil.rmtree(job.folder, ignore_errors=True)
        raise
    shutil.rmtree(job.folder, ignore_errors=True)
    totals = Totals()
    for part in (part for of_shard in parts for part in of_shard):
        totals.add(part)
    students = Totals()
    for cache in own:
        for rows, _ in chain(*(read_cache(cache, shard) for shard in shards_of(cache.path))):
            students.add(text_totals(_checked(cache, rows, student).topk, student.table))
    return _projected(target, student, teacher, totals, students)


def find_files(
    teacher_topk: str | Path | Sequence[str | Path],
    student_topk: str | Path | Sequence[str | Path],
    output: str | Path,
    config: ProjectConfig,
) -> tuple[Path, list[Path], list[Path]]:
    """Return the path of the output, and those of the teacher's and of the student's caches.

    Raises:
        XtokError: if there is no such file, or the output is one of them, or cannot be written.
    """
    target = check_output(output, (".jsonl" if config.to == "vllm" else ".parquet",))
    paths, of_student = (find_texts(given, _CACHES) for given in (teacher_topk, student_topk))
    if any(target.exists() and path.samefile(target) for path in (*paths, *of_student)):
        raise OutputError(f"the output {target} is an input", hint="give another path")
    return target, paths, of_student


def _opened(path: Path, config: ProjectConfig, tokenizer: Tokenizer, note: Note) -> Cache:
    """Open a cache, and check that it is a tokenizer's, as far as its first rows tell."""
    cache = open_cache(path, config.source)
    model, digest = tokenizer.vocabulary.model_id, cache.about.get("tokenizer_sha256")
    if digest not in (None, tokenizer.table.sha256()):
        raise cache_error(
            path,
            f"its ids are of {cache.about.get('tokenizer', 'another tokenizer')}, whose tokens are "
            f"not those of {model}",
            "give the model whose predictions these are",
        )
    first = next((rows for rows, _ in read_cache(cache, shards_of(path)[0], _FIRST_LOOK)), None)
    if first is None:
        return cache
    _checked(cache, first, tokenizer)
    if "normalized" not in cache.about and is_renormalized(first.topk, tokenizer.vocabulary):
        note(
            f"{path}: its probabilities sum to 1 in each row, so they are renormalized over the "
            "candidates: the rest is not known, and none is written"
        )
        cache = replace(cache, about={**cache.about, "normalized": "topk"})
    return cache


def shards_of(path: Path) -> list[TextShard]:
    """Cut a cache into shards: row groups, or ranges of lines, whatever its name ends in."""
    with path.open("rb") as raw:
        kind: Format = "parquet" if raw.read(4) == b"PAR1" else "jsonl"
    return shards(path, "", kind=kind)


def _checked(cache: Cache, rows: StoredRows, tokenizer: Tokenizer) -> StoredRows:
    return checked(
        rows,
        tokenizer.vocabulary,
        renormalized=cache.renormalized,
        complete=cache.kind == "vllm",
    )


def _of_pair(back_map: ProjectionMap, pair: Pair) -> ProjectionMap:
    """Check that a map leads from the teacher to the student."""
    try:
        back_map = admit(pair.reversed, back_map)
        if back_map.enable_scale_trick:
            raise XtokError("it has scale slots", hint="")
    except XtokError as error:
        names = pair.teacher.model_id, pair.student.model_id
        raise XtokError(
            f"the map is of {back_map.student.model_id} → {back_map.teacher.model_id}, and must "
            f"lead from the teacher to the student, {names[0]} → {names[1]}: {error.message}",
            hint=f"leave out {{option}}, or xtok build {names[0]} {names[1]} --for p-kl --target "
            "start --top-k 32",
            parameter="back_map",
        ) from error
    return back_map


def _begin(job: Job, paths: Sequence[Path], note: Note) -> None:
    """Make the folder of the parts, or check that it is of the same job."""
    identity = {
        "format_version": FORMAT_VERSION,
        "tokenizers": job.digests,
        "sources": [asdict(source_of(path)) for path in paths],
        "renormalized": job.caches[0].renormalized,
        "map": mapfile.sha256(job.back_map),
        "config": asdict(replace(job.config, to="neutral")),
        "templates": {name: str(template) for name, template in job.templates.items()},
    }
    plan, text = job.folder / "job.json", json.dumps(identity, indent=1, sort_keys=True)
    if plan.exists():
        if plan.read_text(encoding="utf-8") != text:
            raise XtokError(
                f"the checkpoint {job.folder} is of another run: other files, models or options",
                hint=f"delete it to start again: rm -r {job.folder}",
            )
        note(f"going on from the parts in {job.folder}")
    write(plan, [text.encode()])


def _parts(
    job: Job,
    pair: Pair,
    sources: Sequence[TokenizerSource],
    address: str | None,
    progress: TextProgress,
) -> list[list[Totals]]:
    """Make all parts of a job, but for those that are there; return their totals, by shard."""
    if sources:
        return _project_on_ray(job, sources, address, progress)
    worker = job.worker(pair)
    with progress("projecting", sum(shard.size for _, shard in job.shards)) as advance:
        return [_project_shard(job, n, worker, advance) for n in range(len(job.shards))]


def _project_on_ray(
    job: Job, sources: Sequence[TokenizerSource], address: str | None, progress: TextProgress
) -> list[list[Totals]]:
    """Make all parts of a job on a Ray cluster, a task per shard: the same files, byte for byte.

    All nodes read the files and the tokenizers, and write the parts, under one path.
    """
    from xtok.counting.ray import connected, done_on

    made: dict[int, list[Totals]] = {}
    whole = (job.absolute(), tuple(source.absolute() for source in sources))
    size = sum(shard.size for _, shard in job.shards)
    with connected(address) as ray, progress("projecting", size) as advance:
        for number, totals, _ in done_on(ray, _shard_task, whole, range(len(job.shards))):
            made[number] = totals
            advance(job.shards[number][1].size, sum(part.positions for part in totals))
    return [made[number] for number in range(len(job.shards))]


def _shard_task(whole: tuple[Job, tuple[TokenizerSource, ...]], number: int) -> list[Totals] | Any:
    """Return the totals of a shard's parts, or the arguments of an error."""
    from xtok.counting.ray import ErrorArguments, require_here

    job, sources = whole
    try:
        require_here(job.shards[number][1])
        return _project_shard(job, number, _worker(job.folder, job, sources), lambda *_: None)
    except XtokError as error:
        return ErrorArguments.of(error)


_workers: dict[Path, RowProjector] = {}


def _worker(folder: Path, job: Job, sources: tuple[TokenizerSource, ...]) -> RowProjector:
    """Load the tokenizers once per worker process."""
    from xtok.counting.ray import load_same

    if folder not in _workers:
        os.environ.setdefault("RAYON_NUM_THREADS", "1")  # a task has one core
        _workers.clear()
        pair = pair_of(*load_same(sources, job.digests))
        _workers[folder] = job.worker(pair, num_threads=1)
    return _workers[folder]


def _project_shard(
    job: Job, number: int, worker: RowProjector, advance: Callable[[int, int], object]
) -> list[Totals]:
    """Make the parts of a shard, but for those that are there; return their totals."""
    which, shard = job.shards[number]
    cache = job.caches[which]
    totals = []
    for n, (rows, consumed) in enumerate(read_cache(cache, shard)):
        path = job.part(number, n)
        if path.exists():
            totals.append(_totals_of(path))
        else:
            rows = _checked(cache, rows, worker.teacher)
            made = worker(rows)
            totals.append(_totals(rows.topk, made.topk, worker.teacher.table))
            _write_part(path, made, totals[-1])
        advance(consumed, totals[-1].positions)
    return totals


def _totals(given: TopK, made: TopK, table: TokenTable) -> Totals:
    totals = text_totals(given, table)
    rests = np.exp(made.rest_logprob[made.valid], dtype=np.float64)
    totals.positions, totals.targets = len(made.token_ids), int(made.valid.sum())
    totals.rests, totals.rest = int((~np.isnan(rests)).sum()), float(np.nansum(rests))
    return totals


_TOTALS = b"xtok.totals"

_PARQUET = {"use_dictionary": False, "compression": "zstd", "compression_level": 1}
"""Dictionaries of ids and log-probabilities make files no smaller, and take half the time."""


def _write_part(path: Path, rows: StoredRows, totals: Totals) -> None:
    arrow = need("pyarrow", path)
    table = caches.neutral_table(rows)
    table = table.replace_schema_metadata({_TOTALS: json.dumps(asdict(totals))})
    with writing(path) as temporary, arrow.ipc.new_file(temporary, table.schema) as file:
        file.write_table(table)


def _totals_of(path: Path) -> Totals:
    return Totals(**json.loads(_part(path).schema.metadata[_TOTALS]))


def _part(path: Path) -> Any:
    import pyarrow

    return pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))


def _write(
    job: Job, parts: list[list[Totals]], target: Path, student: Tokenizer, teacher: Tokenizer
) -> None:
    """Join all parts to the output."""
    arrow = need("pyarrow", target)
    paths = [job.part(s, n) for s, of_shard in enumerate(parts) for n in range(len(of_shard))]
    if not paths:
        raise XtokError("the files hold no rows", hint="give a cache that has some")
    schemas = [_part(path).schema.remove_metadata() for path in paths]
    try:
        schema = arrow.unify_schemas(schemas)
    except arrow.ArrowException as error:
        raise XtokError(
            f"the files have columns of one name and other types: {error}",
            hint="project them one by one, or leave out the column",
        ) from error
    meaningless = slot_candidates(student.table)
    of_student = caches.Target(
        model=student.vocabulary.model_id,
        width=job.config.top_k,
        pad_id=meaningless[0] if meaningless else 0,
    )
    about = _about(job, student, teacher)

    def tables() -> Iterator[Any]:
        for path in paths:
            table = _part(path).read_all().replace_schema_metadata()
            table = arrow.concat_tables([schema.empty_table(), table], promote_options="default")
            if job.config.to == "neutral":
                yield table
                continue
            [batch] = table.combine_chunks().to_batches() or [None]
            rows = caches.rows_of_neutral(batch)
            yield caches.WRITERS[job.config.to](rows, of_student)

    if job.config.to == "vllm":
        with writing(target) as temporary, temporary.open("wb") as file:
            for rows in tables():
                file.writelines(rows)
        return
    _write_tables(target, tables(), about)
    if job.config.to == "distillkit":
        config = distillkit.config_for(student.vocabulary.vocab_size, job.config.top_k)
        write(target.with_name(distillkit.CONFIG), [config.encode()])


def _write_tables(target: Path, tables: Iterable[Any], about: Mapping[str, str]) -> None:
    parquet = need("pyarrow.parquet", target)
    with writing(target) as temporary, ExitStack() as stack:
        writer: Any = None
        for one in tables:
            table = one.replace_schema_metadata(about)
            if writer is None:
                made = parquet.ParquetWriter(temporary, table.schema, **_PARQUET)
                writer = stack.enter_context(made)
            writer.write_table(table, row_group_size=len(table) or None)


def _about(job: Job, student: Tokenizer, teacher: Tokenizer) -> dict[str, str]:
    """Return the footer of the output."""
    cache = job.caches[0]
    return {
        "format_version": str(FORMAT_VERSION),
        "convention": "T" if job.config.to == "neutral" else "N",
        "k": str(job.config.top_k),
        "temperature": cache.temperature,
        "log_base": "e",
        "normalized": "topk" if cache.renormalized or job.config.to == "axolotl" else "false",
        "tokenizer": student.vocabulary.model_id,
        "tokenizer_sha256": student.table.sha256(),
        "vocab_size": str(student.vocabulary.vocab_size),
        "teacher": teacher.vocabulary.model_id,
        "teacher_sha256": teacher.table.sha256(),
        "map_sha256": mapfile.sha256(job.back_map),
        "source": "xtok project",
    }


def _projected(
    target: Path, student: Tokenizer, teacher: Tokenizer, totals: Totals, own: Totals
) -> Projected:
    notes = []
    theirs, ours = totals.bits_per_byte, own.bits_per_byte
    if theirs is not None and ours is not None and theirs >= ours:
        notes.append(
            f"the teacher is no better on this text than the student: {theirs:.3f} and {ours:.3f} "
            "bits per byte"
        )
    if not totals.targets:
        notes.append("no student token has a prediction")
    return Projected(
        paths=(os.fspath(target),),
        student=student.vocabulary.model_id,
        teacher=teacher.vocabulary.model_id,
        documents=totals.documents,
        teacher_tokens=totals.teacher_tokens,
        student_tokens=totals.positions,
        targets=totals.targets,
        mean_rest=totals.rest / totals.rests if totals.rests else None,
        teacher_bits_per_byte=theirs,
        teacher_is_bound=totals.bounded > 0,
        student_bits_per_byte=ours,
        student_is_bound=own.bounded > 0,
        notes=tuple(notes),
    )
