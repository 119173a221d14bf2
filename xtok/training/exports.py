"""Files for trainers that take something other than a map, from the same token tables."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from xtok.config import ExportFormat
from xtok.errors import XtokError, install_hint
from xtok.io import check_output, write
from xtok.maps.file import MapLike, as_map
from xtok.maps.pair import with_vocabularies
from xtok.maps.projection_map import ProjectionMap
from xtok.progress import Note, silent_note
from xtok.tokenizers import ModelLike, as_tokenizer
from xtok.training.subtokens import nemo_table
from xtok.vocab.display import plural
from xtok.vocab.roles import match_roles
from xtok.vocab.table import TokenTable, match_bytes


def byte_prefixes(student: TokenTable, teacher: TokenTable) -> NDArray[np.int64]:
    """Return, for each teacher id, the longest student token that its bytes begin with.

    int64 `[V_teacher]`. Control tokens lead to the student token of their role. −1, the residual,
    is for tokens that begin with no student token, and for unused ids.
    """
    ids = student.canonical_ids()
    longest = max(map(len, ids), default=0)
    prefixes = np.full(len(teacher), -1, np.int64)
    for t, token in enumerate(teacher.tokens()):
        for length in range(min(len(token), longest), 0, -1):
            if token[:length] in ids:
                prefixes[t] = ids[token[:length]]
                break
    for t, s in match_roles(teacher, student).items():
        prefixes[t] = s
    return prefixes


class SharedVocabulary(NamedTuple):
    """Pairs of a student and a teacher id, one to one, rising by student id.

    `pairs` have equal bytes; `special_pairs` are special tokens of one role.
    """

    pairs: list[tuple[int, int]]
    special_pairs: list[tuple[int, int]]


def shared_vocabulary(student: TokenTable, teacher: TokenTable) -> SharedVocabulary:
    """Return the tokens that both vocabularies have; an id of either side is in one pair at most.

    Of several ids with the same bytes, the one that the tokenizer emits counts on each side.
    """
    theirs = teacher.canonical_ids()
    pairs = [(s, theirs[token]) for token, s in student.canonical_ids().items() if token in theirs]
    taken = {t for _, t in pairs}
    special: dict[int, int] = {}  # the first student id of each teacher id
    for s, t in match_roles(student, teacher).items():
        if t not in taken:
            special.setdefault(t, s)
    return SharedVocabulary(sorted(pairs), sorted((s, t) for t, s in special.items()))


class DraftMapping(NamedTuple):
    """What vLLM's `VocabMapping` holds for a draft model (student) and a target (teacher).

    The names and meanings are those of `vllm/v1/spec_decode/vocab_mapping.py` (0f17ee0), the widths
    those of both models' logits.

    Attributes:
        draft_to_target_ids: int64 `[V_draft]`, −1 for a token that the target lacks.
        target_to_draft_ids: int64 `[V_target]`, likewise; the inverse.
        intersection_mask_draft: bool `[V_draft]`, what the draft may propose.
    """

    draft_to_target_ids: NDArray[np.int64]
    target_to_draft_ids: NDArray[np.int64]
    intersection_mask_draft: NDArray[np.bool_]


def draft_mapping(draft: TokenTable, target: TokenTable) -> DraftMapping:
    """Map the tokens that a draft and a target model share, by equal bytes and by role.

    Both directions are one to one, so speculative decoding stays lossless.
    """
    shared = shared_vocabulary(draft, target)
    pairs = np.array([*shared.pairs, *shared.special_pairs], np.int64).reshape(-1, 2)
    to_target, to_draft = (np.full(len(table), -1, np.int64) for table in (draft, target))
    to_target[pairs[:, 0]] = pairs[:, 1]
    to_draft[pairs[:, 1]] = pairs[:, 0]
    return DraftMapping(to_target, to_draft, to_target >= 0)


def export(
    projection: MapLike,
    path: str | PathLike[str],
    kind: ExportFormat,
    *,
    student_model: ModelLike | None = None,
    teacher_model: ModelLike | None = None,
    note: Note = silent_note,
) -> list[Path]:
    """Write a map in another format, and return the paths of the files written.

    Args:
        projection: a map, or the path of one; all kinds but `scipy-npz` and `parquet` need its
            token tables.
        path: the file; its suffix is one of the kind's (`SUFFIXES_OF`).
        kind: what to write.
        student_model: for `nemo-subtokens` only: the model of the rows, as `build` takes it.
        teacher_model: likewise, of the columns.
        note: called with a sentence on what was counted, or cut.

    Raises:
        OutputError: if the file cannot be written.
        XtokError: if the map has no tokens, or the tokenizers are missing or not the map's.
    """
    target = check_export(path, kind)
    projection = as_map(projection)
    if kind == "nemo-subtokens":
        if student_model is None or teacher_model is None:
            raise XtokError(
                "nemo-subtokens spells tokens, which takes both tokenizers",
                hint="give both models that the map was made with, the student's with {option}",
                parameter="student_model",
            )
        student, teacher = as_tokenizer(student_model), as_tokenizer(teacher_model)
        with_vocabularies(
            projection, student=student.vocabulary, teacher=teacher.vocabulary, widths=True
        )
        reverse = target.with_name(f"{target.stem}.reverse{target.suffix}")
        tables = {target: nemo_table(student, teacher), reverse: nemo_table(teacher, student)}
        files = {file: table.data for file, table in tables.items()}
        for sentence in chain.from_iterable(table.notes for table in tables.values()):
            note(sentence)
    elif kind == "shared-vocab":
        files = {target: _shared_file(projection, target.suffix, note)}
    else:
        files = {target: _WRITERS[kind](projection)}
    for file, data in files.items():
        write(file, [data])
    return list(files)


SUFFIXES_OF: dict[str, tuple[str, ...]] = {
    "nemo-subtokens": (".pt",),
    "byte-prefix-map": (".safetensors",),
    "shared-vocab": (".json", ".safetensors"),
    "scipy-npz": (".npz",),
    "parquet": (".parquet",),
}
"""The suffixes that a kind of file may have; that of `shared-vocab` decides what is in it."""


def check_export(path: str | PathLike[str], kind: ExportFormat) -> Path:
    """Check, before any work is done, that a file of a kind can be written to a path.

    Raises:
        OutputError: if it cannot be, or the suffix is not one of the kind's.
        ValueError: if there is no such kind.
    """
    if kind not in get_args(ExportFormat):
        raise ValueError(f"format is {kind!r}, and must be one of {get_args(ExportFormat)}")
    target = check_output(path, SUFFIXES_OF[kind], f"{kind} file")
    if kind == "parquet":
        _pyarrow()
    return target


def _byte_prefix_file(projection: ProjectionMap) -> bytes:
    from safetensors.numpy import save

    student, teacher = _tables(projection)
    prefixes = byte_prefixes(student, teacher)
    exact = np.zeros(len(prefixes), np.uint8)
    exact[[t for t in match_bytes(teacher, student) if prefixes[t] >= 0]] = 1
    return save({"student_ids": prefixes, "exact": exact}, {"xtok": _models(projection)})


def _shared_file(projection: ProjectionMap, suffix: str, note: Note) -> bytes:
    """Return the pairs as JSON, or vLLM's arrays as safetensors."""
    from safetensors.numpy import save

    student, teacher = _tables(projection)
    shared = shared_vocabulary(student, teacher)
    note(
        f"{projection.teacher.model_id} has the bytes of {len(shared.pairs):,} of "
        f"{plural(len(student.canonical_ids()), 'token')} of {projection.student.model_id}; "
        f"{plural(len(shared.special_pairs), 'special token')} paired by role"
    )
    if suffix == ".safetensors":
        return save(draft_mapping(student, teacher)._asdict(), {"xtok": _models(projection)})
    content = {**json.loads(_models(projection)), **shared._asdict()}
    return (json.dumps(content) + "\n").encode()


def _scipy_file(projection: ProjectionMap) -> bytes:
    order = np.lexsort((projection.teacher_ids, projection.student_ids))
    indptr = np.zeros(projection.shape[0] + 1, np.int32)
    np.cumsum(projection.entries_per_row, out=indptr[1:])
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        indices=projection.teacher_ids[order],
        indptr=indptr,
        format=np.array(b"csr"),
        shape=np.array(projection.shape, np.int64),
        data=projection.weights[order],
    )
    return buffer.getvalue()


def _parquet_file(projection: ProjectionMap) -> bytes:
    arrow, parquet = _pyarrow()
    columns: dict[str, Any] = {
        "student_id": projection.student_ids,
        "teacher_id": projection.teacher_ids,
        "weight": projection.weights,
        "is_slot": projection.is_slot,
    }
    for side, ids in (("student", projection.student_ids), ("teacher", projection.teacher_ids)):
        table = getattr(projection, side).table
        if table is not None:
            tokens = table.tokens()
            columns[f"{side}_token"] = arrow.array(
                [tokens[i] for i in ids.tolist()], arrow.binary()
            )
    table = arrow.table(columns).replace_schema_metadata({"xtok": _models(projection)})
    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    return buffer.getvalue()


_WRITERS: dict[str, Callable[[ProjectionMap], bytes]] = {
    "byte-prefix-map": _byte_prefix_file,
    "scipy-npz": _scipy_file,
    "parquet": _parquet_file,
}


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise XtokError("parquet needs pyarrow", hint=install_hint("pyarrow")) from error
    return pyarrow, pyarrow.parquet


def _models(projection: ProjectionMap) -> str:
    models = {
        side: {"model_id": vocabulary.model_id, "vocab_size": vocabulary.vocab_size}
        for side, vocabulary in (("student", projection.student), ("teacher", projection.teacher))
    }
    return json.dumps(models, sort_keys=True)


def _tables(projection: ProjectionMap) -> tuple[TokenTable, TokenTable]:
    student, teacher = projection.student.table, projection.teacher.table
    if student is None or teacher is None:
        raise XtokError("the map carries no tokens", hint="export a map that xtok build made")
    return student, teacher
