"""Files for trainers that take something other than a map, from the same token tables."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
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
from xtok.tokenizers import ModelLike, Tokenizer, as_tokenizer
from xtok.vocab.roles import match_roles
from xtok.vocab.table import TokenTable, match_bytes


@dataclass(frozen=True, eq=False)
class Subtokens:
    """Each token of a vocabulary spelled in the tokens of another.

    Attributes:
        subtoks: int64 `[V, L]`, the other side's ids, padded with −1.
        lengths: int64 `[V]`: 1 for a token that both have, 0 for one without a spelling.
    """

    subtoks: NDArray[np.int64]
    lengths: NDArray[np.int64]


def subtokens(of: Tokenizer, into: Tokenizer) -> Subtokens:
    """Spell each token of a vocabulary as another tokenizer does in the middle of a text.

    A token whose bytes the other vocabulary has is that one token, whatever its tokenizer makes of
    them alone. A control token is the token of the same role, or has no spelling.
    """
    spellings = into.segment_batch([token for token in of.table.tokens() if token])
    pieces = {i: s or [] for i, s in zip(of.table.text_ids.tolist(), spellings, strict=True)}
    single = match_bytes(of.table, into.table) | match_roles(of.table, into.table)
    pieces |= {i: [t] for i, t in single.items()}
    lengths = np.zeros(len(of.table), np.int64)
    for i, ids in pieces.items():
        lengths[i] = len(ids)
    subtoks = np.full((len(lengths), max(1, int(lengths.max(initial=0)))), -1, np.int64)
    for i, ids in pieces.items():
        subtoks[i, : len(ids)] = ids
    return Subtokens(subtoks, lengths)


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


def export(
    projection: MapLike,
    path: str | PathLike[str],
    kind: ExportFormat,
    *,
    student_model: ModelLike | None = None,
    teacher_model: ModelLike | None = None,
) -> list[Path]:
    """Write a map in another format, and return the paths of the files written.

    Args:
        projection: a map, or the path of one; all kinds but `scipy-npz` and `parquet` need its
            token tables.
        path: the file; its suffix is that of the kind (`SUFFIX_OF`).
        kind: what to write.
        student_model: for `nemo-subtokens` only: the model of the rows, as `build` takes it.
        teacher_model: likewise, of the columns.

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
        files = {
            target: _subtokens_file(subtokens(student, teacher)),
            reverse: _subtokens_file(subtokens(teacher, student)),
        }
    else:
        files = {target: _WRITERS[kind](projection)}
    for file, data in files.items():
        write(file, [data])
    return list(files)


SUFFIX_OF: dict[str, str] = {
    "nemo-subtokens": ".pt",
    "byte-prefix-map": ".safetensors",
    "shared-vocab": ".json",
    "scipy-npz": ".npz",
    "parquet": ".parquet",
}


def check_export(path: str | PathLike[str], kind: ExportFormat) -> Path:
    """Check, before any work is done, that a file of a kind can be written to a path.

    Raises:
        OutputError: if it cannot be, or the suffix is not that of the kind.
        ValueError: if there is no such kind.
    """
    if kind not in get_args(ExportFormat):
        raise ValueError(f"format is {kind!r}, and must be one of {get_args(ExportFormat)}")
    target = check_output(path, [SUFFIX_OF[kind]], f"{kind} file")
    if kind == "parquet":
        _pyarrow()
    return target


def _subtokens_file(spelled: Subtokens) -> bytes:
    import torch

    buffer = io.BytesIO()  # torch.save writes a file's name into the file
    tensors = {name: torch.from_numpy(array) for name, array in vars(spelled).items()}
    torch.save(tensors, buffer)
    return buffer.getvalue()


def _byte_prefix_file(projection: ProjectionMap) -> bytes:
    from safetensors.numpy import save

    student, teacher = _tables(projection)
    prefixes = byte_prefixes(student, teacher)
    exact = np.zeros(len(prefixes), np.uint8)
    exact[[t for t in match_bytes(teacher, student) if prefixes[t] >= 0]] = 1
    return save({"student_ids": prefixes, "exact": exact}, {"xtok": _models(projection)})


def _shared_file(projection: ProjectionMap) -> bytes:
    shared = shared_vocabulary(*_tables(projection))
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
    "shared-vocab": _shared_file,
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
