"""`verify`: check a map's invariants, and compare the map with its models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import fspath

import numpy as np

from xtok.errors import MALFORMED, describe_damage
from xtok.inspection.pair_facts import SpellingFacts
from xtok.inspection.results import Check, Level, Result
from xtok.maps import packing
from xtok.maps.map_arguments import MAP_CLASSES, AnyMap, AnyMapLike, can_grow, is_swapped, read_map
from xtok.maps.opening import read_parts
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers import ModelLike, Tokenizer, load_pair, load_tokenizer
from xtok.tokenizers.display import listed, plural
from xtok.tokenizers.notes import examples_of
from xtok.tokenizers.pairs import Pair
from xtok.tokenizers.roles import ROLES
from xtok.tokenizers.table import SIDES, TokenTable, TokenType, Vocabulary, differing_ids


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Results of `verify` for the map at `path`."""

    path: str
    failed: tuple[str, ...]  # names of the failed checks
    checks: tuple[Check, ...]


def verify(
    any_map: AnyMapLike,
    student_model: ModelLike | Pair | None = None,
    teacher_model: ModelLike | None = None,
    *,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
) -> Verification:
    """Check format, digests, invariants and roles of a map, and compare the map with models.

    >>> checks = xtok.verify(xtok.build("bytes", "bytes"), "bytes").checks
    >>> {check.name: check.message for check in checks}["exact rows"]
    '256 rows of equal bytes'

    Args:
        any_map: a map of any kind, or the path of its file.
        student_model: the student, or a pair. If None, the student is not compared.
        teacher_model: the teacher. If None, the teacher is not compared.
        student_vocab_size: the expected number of rows, which a `.pt` file may not record.
        teacher_vocab_size: the expected number of columns.

    Raises:
        MapFileError: if the file cannot be read, or is not a map.
        TokenizerError: if a model cannot be loaded.
        TypeError: if both a pair and a model are given.
    """
    widths = student_vocab_size, teacher_vocab_size
    if isinstance(student_model, Pair):
        pair = load_pair(student_model, teacher_model)
        tokenizers = [pair.student_tokenizer, pair.teacher_tokenizer]
    else:
        models = zip((student_model, teacher_model), widths, strict=True)
        tokenizers = [m if m is None else load_tokenizer(m, vocab_size=n) for m, n in models]
    parts = None if isinstance(any_map, AnyMap) else read_parts(any_map)
    digests: Mapping[str, str | None] = {}
    try:
        if parts is None:
            m = read_map(any_map, student_vocab_size=widths[0], teacher_vocab_size=widths[1])
        else:
            header = packing.parse_header(parts[1])
            m, digests = packing.assemble(MAP_CLASSES[packing.kind_of(header)], parts[0], header)
        checks = *_checks(m, digests), *_model_checks(m, tokenizers, widths)
    except MALFORMED as error:
        checks = (Check("format", "failed", describe_damage(error)),)
    return Verification(
        path="the map" if isinstance(any_map, AnyMap) else fspath(any_map),
        failed=tuple(check.name for check in checks if check.level == "failed"),
        checks=checks,
    )


def _checks(m: AnyMap, digests: Mapping[str, str | None]) -> Iterator[Check]:
    sides = {"student": m.student, "teacher": m.teacher}
    contents = f"{m.nnz:,} entries" if isinstance(m, ProjectionMap) else m.KIND
    yield Check("format", "ok", f"{m.shape[0]:,} × {m.shape[1]:,}, {contents}")
    if "tensors" in digests:
        yield Check("tensors", *_tensors(m, digests["tensors"]))
    for side, vocabulary in sides.items():
        table = vocabulary.table
        result = _NO_TOKENS
        if table is not None:
            result = _digest("table_sha256", table.sha256(), digests.get(side), "tokens")
        yield Check(f"{side} tokens", *result)
    invariants = list(_invariants(m))
    yield from invariants
    if invariants[-1].level == "failed":  # the following checks rely on this check
        yield Check("rows", "skipped", "not checked, because an invariant is violated")
    else:
        yield from _kind_checks(m)
    for side, vocabulary in sides.items():
        result = _NO_TOKENS if vocabulary.table is None else _roles(vocabulary.table)
        yield Check(f"{side} roles", *result)


def _model_checks(
    m: AnyMap, tokenizers: Sequence[Tokenizer | None], widths: Sequence[int | None]
) -> Iterator[Check]:
    student, teacher = tokenizers
    if student is not None and teacher is not None and is_swapped(load_pair(student, teacher), m):
        names = f"the map's student is {m.student.model_id}, its teacher {m.teacher.model_id}"
        yield Check("sides", "failed", f"swapped: {names}; pass the student first")
        return
    for side, tokenizer, width in zip(SIDES, tokenizers, widths, strict=True):
        vocabulary: Vocabulary = getattr(m, side)
        others = [] if tokenizer is None else [tokenizer.vocabulary]
        if width is not None and not any(v.vocab_size == width for v in others):
            others.append(replace(vocabulary, table=None, vocab_size=width, width_source="option"))
        if tokenizer is not None:
            tokens = Check(f"{side} model", *_tokens(vocabulary.table, tokenizer))
            yield tokens
            if tokens.level != "failed":
                yield Check(f"{side} definition", *_definition(vocabulary, tokenizer))
        for other in others:
            yield Check(f"{side} width", *_width(vocabulary, other))


def _kind_checks(m: AnyMap) -> Iterator[Check]:
    if isinstance(m, SpellingMap):
        for side in SIDES:
            yield Check(f"{side} spelled", "ok", str(SpellingFacts.of(m, side)))
    if not isinstance(m, ProjectionMap):
        return
    # repairs made while reading a `.pt`
    counts = [r.counts.items() for r in m.reports if r.stage == "import"]
    changed = ", ".join(f"{n:,} {noun}" for items in counts for noun, n in items if n)
    # other programs can write entries in any order
    level: Level = "note" if m.method == "imported" else "failed"
    yield Check("as written", level if changed else "ok", changed or "in order")
    yield Check("scale slot", *_slots(m))
    yield Check("exact rows", *_exact_rows(m))


def _invariants(m: AnyMap) -> Iterator[Check]:
    for name, (check, holds) in m.INVARIANTS.items():
        try:
            check(m)
        except ValueError as error:
            yield Check(name, "failed", str(error))
            return
        yield Check(name, "ok", holds)


_NO_TOKENS: Result = "skipped", "the map contains no tokens"


def _digest(name: str, digest: str, recorded: str | None, contents: str) -> Result:
    if recorded in (None, digest):
        return "ok", f"{name} is {digest[:16]}…"
    return "failed", f"{name} is {recorded!s:.16}…, but the {contents} have {digest[:16]}…"


def _tensors(m: AnyMap, recorded: str | None) -> Result:
    if recorded is None:
        return "skipped", "written by an earlier version, without a digest"
    return _digest("tensors_sha256", packing.tensors_sha256(m), recorded, "tensors")


def _slots(m: ProjectionMap) -> Result:
    table = m.teacher.table
    if m.scale_slot is None:
        return "skipped", "built without scale slots"
    ids = np.unique(m.teacher_ids[m.is_slot]).tolist()
    if table is not None and (meaning := [i for i in ids if table[i]]):
        return "failed", f"slots are on {examples_of(meaning, table, 'id')}, which are text tokens"
    return "ok", f"{plural(int(m.is_slot.sum()), 'row')}, on teacher id {listed(ids) or 'none'}"


def _exact_rows(m: ProjectionMap) -> Result:
    student, teacher = m.student.table, m.teacher.table
    exact = np.flatnonzero(m.row_kind == RowKind.EXACT)
    sizes = m.entries_per_row[exact]
    if (sizes != 1).any():
        index = int(np.argmax(sizes != 1))
        return "failed", f"row {exact[index]} has {sizes[index]} entries"
    if student is None or teacher is None:
        return _NO_TOKENS
    student_tokens, teacher_tokens = student.tokens(), teacher.tokens()
    partners = m.teacher_ids[m.row_kind[m.student_ids] == RowKind.EXACT]
    pairs = zip(exact.tolist(), partners.tolist(), strict=True)
    unequal = [s for s, t in pairs if student_tokens[s] != teacher_tokens[t]]
    if unequal and all(step["options"].get("token_form", "bytes") == "bytes" for step in m.history):
        return "failed", f"bytes differ in the rows of {examples_of(unequal, student, 'id')}"
    only = f", {len(unequal):,} of them equal only in another token form" if unequal else ""
    return "ok", f"{len(exact):,} rows of equal bytes{only}"


def _roles(table: TokenTable) -> Result:
    unknown = [role for role in table.roles if role not in ROLES]
    if unknown:
        return "failed", f"unknown roles {unknown}"
    unused = sorted(i for i in table.roles_by_id if table.types[i] == TokenType.UNUSED)
    if unused:
        return "failed", f"some roles are on unused ids: {listed(unused)}"
    tokens = plural(len(table.roles_by_id), "token")
    return "ok", f"{tokens} with a role: {listed(table.roles) or 'none'}"


def _tokens(stored: TokenTable | None, tokenizer: Tokenizer) -> Result:
    loaded, model_id = tokenizer.table, tokenizer.vocabulary.model_id
    if stored is None:
        return _NO_TOKENS
    if stored.sha256() == loaded.sha256():
        return "ok", f"the tokens of {model_id}"
    differ = differing_ids(stored, loaded)
    if not differ:
        return "failed", f"the types of some tokens differ from {model_id}"
    examples = listed(f"{i} {stored.quoted(i)} and {loaded.quoted(i)}" for i in differ)
    return "failed", f"{len(differ):,} ids differ from {model_id}: {examples}"


def _definition(stored: Vocabulary, tokenizer: Tokenizer) -> Result:
    loaded = tokenizer.vocabulary
    if stored.definition_sha256 is None:
        return "skipped", f"the file does not record a tokenizer definition of {loaded.model_id}"
    if stored.backend != loaded.backend:
        kinds = f"the map was built from {stored.backend} files, the model has {loaded.backend}"
        return "skipped", f"{kinds} files, so their definitions cannot be compared"
    digest = tokenizer.definition_sha256
    if stored.definition_sha256 == digest:
        return "ok", f"definition_sha256 is {digest[:16]}…"
    changed = "the merges, split pattern, normalizer, flags or roles differ"
    return "failed", f"{loaded.model_id} has changed since the map was built: {changed}"


def _width(stored: Vocabulary, loaded: Vocabulary) -> Result:
    width, source = f"{stored.vocab_size:,}", loaded.width_source
    if stored.vocab_size == loaded.vocab_size:
        return "ok", f"{width}, from the {source}"
    if can_grow(stored, loaded):
        return "ok", f"{width} in the file, {loaded.vocab_size:,} in the model"
    if source == "tokenizer" and stored.vocab_size > loaded.vocab_size:
        tokens = f"the model with {loaded.vocab_size:,} tokens has no config.json"
        return "ok", f"{width}; not checked, because {tokens}"
    return "failed", f"{width} in the file, but {loaded.vocab_size:,} from the {source}"
