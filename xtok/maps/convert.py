"""`convert`: a map as another file format, or as the tables that other programs read."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from xtok.config import MapFormat
from xtok.errors import XtokError
from xtok.io import check_output, write
from xtok.maps import file as mapfile
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.subtokens import nemo_table
from xtok.progress import Note, silent_note
from xtok.tokenizers import ModelLike, PairLike
from xtok.tokenizers import pair as pair_of
from xtok.vocab.display import plural
from xtok.vocab.pair import Pair
from xtok.vocab.roles import match_roles
from xtok.vocab.table import TokenTable

SUFFIX_OF: dict[MapFormat, str] = {
    "safetensors": ".safetensors",
    "pt": ".pt",
    "nemo-subtokens": ".pt",
    "vllm-tli": ".safetensors",
}


def convert(
    projection: mapfile.MapLike,
    output: str | PathLike[str],
    *,
    to: MapFormat | None = None,
    student_model: PairLike | None = None,
    teacher_model: ModelLike | None = None,
    note: Note = silent_note,
    **options: Any,
) -> list[Path]:
    """Write a map in another format, and return the paths of the files written.

    Args:
        projection: a map, or the path of any file that `load` reads.
        output: the file.
        to: `safetensors`; `pt`, as NeMo-RL reads it; `nemo-subtokens`, the two tables of NeMo-RL's
            drafts, the teacher's beside the output as `NAME.reverse.pt`; or `vllm-tli`, the arrays
            of vLLM's token-level intersection, with the student as the draft model. None tells by
            the suffix.
        student_model: the model of the rows, for `nemo-subtokens`.
        teacher_model: the model of the columns.
        note: called with a sentence on what was counted, or cut.
        options: as for `load`, for a path.

    Raises:
        OutputError: if the output cannot be written.
        MapFileError: if the file is not a map.
        XtokError: if the map has no tokens, or the tokenizers are missing or not the map's.
    """
    target = check_converted(output, to)
    if isinstance(projection, ProjectionMap) and options:
        raise TypeError(f"{', '.join(options)}: options of reading a file, not of a map")
    if not isinstance(projection, ProjectionMap):
        projection = mapfile.load(projection, **options)
    if to == "nemo-subtokens":
        pair = pair_of(student_model, teacher_model, of=projection)
        return _write_subtokens(projection, target, pair, note)
    if to == "vllm-tli":
        write(target, [_intersection(projection, note)])
    else:
        mapfile.save(projection, target)
    return [target]


def check_converted(output: str | PathLike[str], to: MapFormat | None) -> Path:
    """Check, before any work is done, that a map can be written there in a format.

    Raises:
        OutputError: if it cannot be, or the suffix is not the format's.
        ValueError: if there is no such format.
    """
    if to is None:
        return mapfile.check_output(output)
    if to not in SUFFIX_OF:
        raise ValueError(f"to is {to!r}, and must be one of {get_args(MapFormat)}")
    return check_output(output, (SUFFIX_OF[to],), f"{to} file")


def _write_subtokens(
    projection: ProjectionMap,
    target: Path,
    pair: Pair,
    note: Note,
) -> list[Path]:
    if pair.student_tokenizer is None or pair.teacher_tokenizer is None:
        raise XtokError(
            "nemo-subtokens spells tokens, which takes both tokenizers",
            hint="give both models that the map was made with, the student's with {option}",
            parameter="student_model",
        )
    pair.admit(projection)
    reverse = target.with_name(f"{target.stem}.reverse{target.suffix}")
    tables = nemo_table(pair, note), nemo_table(pair.reversed, note)
    for path, table in zip((target, reverse), tables, strict=True):
        write(path, [table])
    return [target, reverse]


class DraftMapping(NamedTuple):
    """What vLLM's `VocabMapping` holds for a draft model (student) and a target (teacher).

    The names and meanings are those of `vllm/v1/spec_decode/vocab_mapping.py` (0f17ee0), the widths
    those of both models' logits.
    """

    draft_to_target_ids: NDArray[np.int64]  # [V_draft], −1 for a token that the target lacks
    target_to_draft_ids: NDArray[np.int64]  # [V_target], the inverse
    intersection_mask_draft: NDArray[np.bool_]  # [V_draft], what the draft may propose


def draft_mapping(draft: TokenTable, target: TokenTable) -> DraftMapping:
    """Map the tokens that a draft and a target model share, by equal bytes and by role.

    Both directions are one to one, so speculative decoding stays lossless. Of several ids with the
    same bytes, the one that the tokenizer emits counts on each side.
    """
    theirs = target.canonical_ids()
    ours = draft.canonical_ids()
    pairs = {theirs[token]: s for token, s in ours.items() if token in theirs}
    for s, t in match_roles(draft, target).items():
        pairs.setdefault(t, s)  # the first draft id of each target id
    to_target, to_draft = (np.full(len(table), -1, np.int64) for table in (draft, target))
    to_target[list(pairs.values())] = list(pairs)
    to_draft[list(pairs)] = list(pairs.values())
    return DraftMapping(to_target, to_draft, to_target >= 0)


def _intersection(projection: ProjectionMap, note: Note) -> bytes:
    """Return vLLM's arrays as a safetensors file."""
    from safetensors.numpy import save

    sides = {"student": projection.student, "teacher": projection.teacher}
    student, teacher = (vocabulary.table for vocabulary in sides.values())
    if student is None or teacher is None:
        raise XtokError("the map carries no tokens", hint="convert a map that xtok build made")
    mapping = draft_mapping(student, teacher)
    is_text = student.lengths > 0
    note(
        f"{projection.teacher.model_id} has the bytes of "
        f"{np.count_nonzero(mapping.intersection_mask_draft & is_text):,} of "
        f"{plural(len(student.canonical_ids()), 'token')} of {projection.student.model_id}; "
        f"{plural(int((mapping.intersection_mask_draft & ~is_text).sum()), 'special token')} "
        "paired by role"
    )
    models = {
        side: {"model_id": vocabulary.model_id, "vocab_size": vocabulary.vocab_size}
        for side, vocabulary in sides.items()
    }
    return bytes(save(mapping._asdict(), {"xtok": json.dumps(models, sort_keys=True)}))
