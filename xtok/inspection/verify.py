"""`verify`: a map against its own invariants and, where given, against models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import fspath
from typing import Literal

import numpy as np

from xtok.maps import file as mapfile
from xtok.maps.pair import can_grow
from xtok.maps.projection_map import INVARIANTS, ProjectionMap, RowKind
from xtok.tokenizers import ModelLike, Tokenizer, as_tokenizer
from xtok.vocab.display import quoted
from xtok.vocab.roles import ROLES
from xtok.vocab.table import TokenTable, Vocabulary

_EXAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class MapCheck:
    """One check of a map: its name, whether it holds, and what was found.

    `skipped` are checks that the file has nothing for.
    """

    name: str
    level: Literal["ok", "failed", "skipped"]
    message: str


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What `verify` found; `path` names the map."""

    path: str
    checks: tuple[MapCheck, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the checks that failed."""
        return tuple(check.name for check in self.checks if check.level == "failed")


def verify(
    projection: mapfile.MapLike,
    *,
    student_model: ModelLike | None = None,
    teacher_model: ModelLike | None = None,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
) -> Verification:
    """Check a map: format, digests, order, sums, slots, exact rows, roles; and its models.

    Args:
        projection: a map, or the path of a `.safetensors` or `.pt` file.
        student_model: the model that the rows should be of, as `build` takes it; its width is what
            its config says, where there is one.
        teacher_model: the model that the columns should be of, likewise.
        student_vocab_size: the width of the rows, for a `.pt` file that does not tell it.
        teacher_vocab_size: the width of the columns, likewise.

    Raises:
        MapFileError: if the file cannot be read, or is no map at all.
    """
    models = [
        (side, None if model is None else as_tokenizer(model))
        for side, model in (("student", student_model), ("teacher", teacher_model))
    ]
    if isinstance(projection, ProjectionMap):
        return Verification(path="the map", checks=tuple(_all(projection, (), models)))
    path = fspath(projection)
    parts = mapfile.read_parts(path)
    if parts is None:
        projection = mapfile.load(
            path, student_vocab_size=student_vocab_size, teacher_vocab_size=teacher_vocab_size
        )
        checks = tuple(_all(projection, (), models))
    else:
        try:
            checks = tuple(_all(*mapfile.assemble(*parts), models))
        except mapfile.MALFORMED as error:
            missing = "it lacks " if isinstance(error, KeyError) else ""
            checks = (_failed("format", f"{missing}{error}"),)
    return Verification(path=path, checks=checks)


def _all(
    m: ProjectionMap,
    digests: Sequence[str | None],
    models: Sequence[tuple[str, Tokenizer | None]],
) -> Iterator[MapCheck]:
    """Give every check of a map; `digests` are those that its file has of both tables, if any."""
    yield _ok("format", f"{m.student.width} × {m.teacher.width}, {m.nnz:,} entries")
    for place, (side, vocabulary) in enumerate((("student", m.student), ("teacher", m.teacher))):
        yield _digest(f"{side} tokens", vocabulary, digests[place : place + 1])
    invariants = list(_invariants(m))
    yield from invariants
    if invariants[-1].level == "failed":  # what comes after relies on it
        yield MapCheck(name="rows", level="skipped", message="the arrays are not in order")
    else:
        yield _as_read(m)
        yield _slots(m)
        yield _exact_rows(m)
    yield _roles("student roles", m.student)
    yield _roles("teacher roles", m.teacher)
    for side, tokenizer in models:
        if tokenizer is not None:
            vocabulary = getattr(m, side)
            yield _same_tokens(side, vocabulary, tokenizer)
            yield _same_width(side, vocabulary, tokenizer.vocabulary)


def _invariants(m: ProjectionMap) -> Iterator[MapCheck]:
    """Check one after another, up to the first that fails."""
    for name, (check, says) in INVARIANTS.items():
        try:
            check(m)
        except ValueError as error:
            yield _failed(name, str(error))
            return
        yield _ok(name, says)


def _digest(name: str, vocabulary: Vocabulary, written: Sequence[str | None]) -> MapCheck:
    if vocabulary.table is None:
        return MapCheck(name=name, level="skipped", message="the map carries none")
    digest = vocabulary.table.sha256()
    if all(one == digest for one in written):
        return _ok(name, f"table_sha256 is {digest[:16]}…")
    return _failed(
        name, f"table_sha256 says {str(written[0])[:16]}…, the tokens give {digest[:16]}…"
    )


def _as_read(m: ProjectionMap) -> MapCheck:
    """Tell what a `.pt` had to be put in order for."""
    imports = [report for report in m.reports if report.stage == "import"]
    counts = [f"{n:,} {what}" for report in imports for what, n in report.counts.items() if n]
    return _failed("as written", ", ".join(counts)) if counts else _ok("as written", "in order")


def _slots(m: ProjectionMap) -> MapCheck:
    name, table = "scale slot", m.teacher.table
    if m.scale_slot is None:
        return MapCheck(name=name, level="skipped", message="made without the scale trick")
    ids = np.unique(m.teacher_ids[m.is_slot]).tolist()
    meaning = [] if table is None else [i for i in ids if table[i]]
    if meaning and table is not None:
        return _failed(name, f"on {_some(meaning, table)}, which stand for text")
    where = ", ".join(map(str, ids[:_EXAMPLES])) or "none"
    return _ok(name, f"{int(m.is_slot.sum()):,} rows, on teacher id {where}")


def _exact_rows(m: ProjectionMap) -> MapCheck:
    name, rows, columns = "exact rows", m.student.table, m.teacher.table
    exact = np.flatnonzero(m.row_kind == RowKind.EXACT)
    sizes = m.entries_per_row[exact]
    if (sizes != 1).any():
        place = int(np.argmax(sizes != 1))
        return _failed(name, f"row {exact[place]} has {sizes[place]} entries")
    if rows is None or columns is None:
        return MapCheck(name=name, level="skipped", message="the map carries no tokens")
    ours, theirs = rows.tokens(), columns.tokens()
    partner = dict(zip(m.student_ids.tolist(), m.teacher_ids.tolist(), strict=True))
    wrong = [s for s in exact.tolist() if ours[s] != theirs[partner[s]]]
    if wrong and all(step["options"].get("token_form", "bytes") == "bytes" for step in m.history):
        return _failed(name, f"other bytes in the rows of {_some(wrong, rows)}")
    only = f", but for {len(wrong):,} that are equal in another token form" if wrong else ""
    return _ok(name, f"{len(exact):,} rows of equal bytes{only}")


def _roles(name: str, vocabulary: Vocabulary) -> MapCheck:
    table = vocabulary.table
    if table is None:
        return MapCheck(name=name, level="skipped", message="the map carries no tokens")
    unknown = [role for role in table.roles if role not in ROLES]
    if unknown:
        return _failed(name, f"unknown roles {unknown}")
    ids = [i for role_ids in table.roles.values() for i in role_ids]
    unused = [i for i in ids if table.name(i) == "(unused)"]
    if unused:
        return _failed(name, f"on unused ids {unused[:_EXAMPLES]}")
    return _ok(name, f"{len(table.roles)} roles of {len(set(ids))} tokens")


def _same_tokens(side: str, ours: Vocabulary, tokenizer: Tokenizer) -> MapCheck:
    name, theirs = f"{side} model", tokenizer.table
    model_id = tokenizer.vocabulary.model_id
    if ours.table is None:
        return MapCheck(name=name, level="skipped", message="the map carries no tokens to compare")
    if ours.table.sha256() == theirs.sha256():
        return _ok(name, f"the tokens of {model_id}")
    differ = [i for i, (a, b) in enumerate(_contents(ours.table, theirs)) if a != b]
    if not differ:
        return _failed(name, f"the types of some tokens are not those of {model_id}")
    examples = ", ".join(
        f"{i} {_name(ours.table, i)} and {_name(theirs, i)}" for i in differ[:_EXAMPLES]
    )
    return _failed(name, f"{len(differ):,} ids differ from {model_id}: {examples}")


def _contents(
    a: TokenTable, b: TokenTable
) -> Iterator[tuple[tuple[bytes, str | None], tuple[bytes, str | None]]]:
    ours, theirs = a.tokens(), b.tokens()
    for i in range(max(len(ours), len(theirs))):
        yield (
            (ours[i] if i < len(ours) else b"", a.control_names.get(i)),
            (theirs[i] if i < len(theirs) else b"", b.control_names.get(i)),
        )


def _name(table: TokenTable, token_id: int) -> str:
    name = table.name(token_id) if token_id < len(table) else "(none)"
    return quoted(name)


def _same_width(side: str, ours: Vocabulary, theirs: Vocabulary) -> MapCheck:
    name = f"{side} width"
    if ours.vocab_size == theirs.vocab_size and ours.width_is_known:
        return _ok(name, f"{ours.vocab_size:,}, from the {theirs.width_source}")
    if can_grow(ours, theirs):
        return _ok(name, f"{ours.width} by the file, {theirs.vocab_size:,} by the model")
    if theirs.width_source == "tokenizer" and ours.vocab_size > theirs.vocab_size:
        return _ok(
            name, f"{ours.vocab_size:,}; no config beside the {theirs.vocab_size:,} tokens to ask"
        )
    return _failed(
        name, f"{ours.vocab_size:,}, and {theirs.vocab_size:,} by the {theirs.width_source}"
    )


def _some(ids: list[int], table: TokenTable) -> str:
    examples = ", ".join(f"{i} {_name(table, i)}" for i in ids[:_EXAMPLES])
    return f"{len(ids):,} ids: {examples}{', …' if len(ids) > _EXAMPLES else ''}"


def _ok(name: str, message: str) -> MapCheck:
    return MapCheck(name=name, level="ok", message=message)


def _failed(name: str, message: str) -> MapCheck:
    return MapCheck(name=name, level="failed", message=message)
