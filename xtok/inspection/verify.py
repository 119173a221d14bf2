"""Check a map file against its own invariants and, where given, against models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Literal

import numpy as np

from xtok.maps import file as mapfile
from xtok.maps.pair import can_grow
from xtok.maps.projection_map import INVARIANTS, ProjectionMap, RowKind
from xtok.tokenizers import Tokenizer
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
    """What `xtok verify` found."""

    path: str
    checks: tuple[MapCheck, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the checks that failed."""
        return tuple(check.name for check in self.checks if check.level == "failed")


def verify(
    path: str | PathLike[str],
    *,
    student: Tokenizer | None = None,
    teacher: Tokenizer | None = None,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
) -> Verification:
    """Check a map file: format, digests, order, sums, slots, pins, roles; and its models.

    Args:
        path: a `.safetensors` or `.pt` map.
        student: the tokenizer that the rows should be of; its width is what the model's config
            says, where there is one.
        teacher: the tokenizer that the columns should be of, likewise.
        student_vocab_size: the width of the rows, for a `.pt` that does not tell it.
        teacher_vocab_size: the width of the columns, likewise.

    Raises:
        MapFileError: if it cannot be read, or is no map at all.
    """
    try:
        projection, digests = mapfile.load_unchecked(
            path, student_vocab_size=student_vocab_size, teacher_vocab_size=teacher_vocab_size
        )
    except mapfile.InvalidMapError as error:
        checks: tuple[MapCheck, ...] = (_failed("format", str(error)),)
    else:
        checks = tuple(_all(projection, digests, student, teacher))
    return Verification(path=str(path), checks=checks)


def _all(
    m: ProjectionMap,
    digests: Sequence[str | None],
    student: Tokenizer | None,
    teacher: Tokenizer | None,
) -> Iterator[MapCheck]:
    yield _ok("format", f"{m.student.width} × {m.teacher.width}, {m.nnz:,} entries")
    yield from _digest("student tokens", m.student, digests[0])
    yield from _digest("teacher tokens", m.teacher, digests[1])
    found = list(_invariants(m))
    yield from found
    if found[-1].level == "failed":  # what comes after relies on it
        yield MapCheck(name="rows", level="skipped", message="the arrays are not in order")
    else:
        yield _as_read(m)
        yield from _slots(m)
        yield from _pins(m)
    yield from _roles("student roles", m.student)
    yield from _roles("teacher roles", m.teacher)
    for side, ours, tokenizer in (
        ("student", m.student, student),
        ("teacher", m.teacher, teacher),
    ):
        if tokenizer is not None:
            yield _same_tokens(side, ours, tokenizer)
            yield _same_width(side, ours, tokenizer.vocabulary)


def _invariants(m: ProjectionMap) -> Iterator[MapCheck]:
    """Check one after another, up to the first that fails."""
    for name, (check, says) in INVARIANTS.items():
        problem = _problem(check, m)
        yield _ok(name, says) if problem is None else _failed(name, problem)
        if problem is not None:
            return


def _problem(check: Callable[[ProjectionMap], None], m: ProjectionMap) -> str | None:
    try:
        check(m)
    except ValueError as error:
        return str(error)
    return None


def _digest(name: str, vocabulary: Vocabulary, written: str | None) -> Iterator[MapCheck]:
    if vocabulary.table is None:
        yield MapCheck(name=name, level="skipped", message="the map carries none")
        return
    found = vocabulary.table.sha256()
    if found == written:
        yield _ok(name, f"table_sha256 is {found[:16]}…")
    else:
        yield _failed(
            name, f"table_sha256 says {str(written)[:16]}…, the tokens give {found[:16]}…"
        )


def _as_read(m: ProjectionMap) -> MapCheck:
    counts = [
        f"{n:,} {what}" for report in m.reports for what, n in report.counts.items() if n
    ]  # what a .pt had to be put in order for
    return _failed("as written", ", ".join(counts)) if counts else _ok("as written", "in order")


def _slots(m: ProjectionMap) -> Iterator[MapCheck]:
    if m.scale_slot is None:
        yield MapCheck(name="scale slot", level="skipped", message="made without the scale trick")
        return
    ids = np.unique(m.teacher_ids[m.is_slot])
    table = m.teacher.table
    meaning = [] if table is None else [i for i in ids.tolist() if table[i]]
    if meaning and table is not None:
        yield _failed("scale slot", f"on {_some(meaning, table)}, which stand for text")
    else:
        where = ", ".join(map(str, ids[:_EXAMPLES].tolist())) or "none"
        yield _ok("scale slot", f"{int(m.is_slot.sum()):,} rows, on teacher id {where}")


def _pins(m: ProjectionMap) -> Iterator[MapCheck]:
    rows, columns = m.student.table, m.teacher.table
    exact = np.flatnonzero(m.row_kind == RowKind.EXACT)
    single = m.entries_per_row[exact] == 1
    if not single.all():
        s = int(exact[int(np.argmin(single))])
        yield _failed("exact rows", f"row {s} has {int(m.entries_per_row[s])} entries")
        return
    if rows is None or columns is None:
        yield MapCheck(name="exact rows", level="skipped", message="the map carries no tokens")
        return
    ours, theirs = rows.tokens(), columns.tokens()
    partner = dict(zip(m.student_ids.tolist(), m.teacher_ids.tolist(), strict=True))
    wrong = [s for s in exact.tolist() if ours[s] != theirs[partner[s]]]
    if wrong and all(step["options"].get("token_form", "bytes") == "bytes" for step in m.history):
        yield _failed("exact rows", f"other bytes in the rows of {_some(wrong, rows)}")
    else:
        only = f", but for {len(wrong):,} that are equal by --token-form" if wrong else ""
        yield _ok("exact rows", f"{len(exact):,} rows of equal bytes{only}")


def _roles(name: str, vocabulary: Vocabulary) -> Iterator[MapCheck]:
    table = vocabulary.table
    if table is None:
        yield MapCheck(name=name, level="skipped", message="the map carries no tokens")
        return
    unknown = [role for role in table.roles if role not in ROLES]
    unused = [i for ids in table.roles.values() for i in ids if table.name(i) == "(unused)"]
    if unknown or unused:
        what = f"unknown roles {unknown}" if unknown else f"on unused ids {unused[:_EXAMPLES]}"
        yield _failed(name, what)
    else:
        ids = {i for found in table.roles.values() for i in found}
        yield _ok(name, f"{len(table.roles)} roles of {len(ids)} tokens")


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
