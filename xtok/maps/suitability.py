"""Check whether the rows of a map suit a loss."""

from __future__ import annotations

from xtok.maps.projection_map import ProjectionMap
from xtok.maps.records import RowKind
from xtok.tokenizers.display import percent, plural

# H-KL compares two tokens if the row's heaviest entry has at least this weight (NeMo-RL).
H_KL_THRESHOLD = 0.6


def p_kl_problems(projection: ProjectionMap) -> list[str]:
    """Return the reasons why a map's rows are not the probabilities that P-KL needs."""
    slots, exact = projection.weights[projection.is_slot], exact_rows(projection)
    problems = []
    if len(slots):
        problems.append(
            f"scale slots take {percent(float(slots.mean()), 0)} of the weight in "
            f"{plural(len(slots), 'row')}"
        )
    if exact:
        problems.append(
            f"{plural(exact, 'exact row')} put all weight on one token, although the teacher may "
            "use a longer token there"
        )
    if is_counted(projection) is False:
        problems.append("weights were not counted on text")
    return problems


def exact_rows(projection: ProjectionMap) -> int:
    """Return the number of exact rows, without special tokens if the special tokens are known."""
    is_exact = projection.row_kind == RowKind.EXACT
    if projection.student.table is not None:
        is_exact = is_exact & (projection.student.table.lengths > 0)
    return int(is_exact.sum())


def is_counted(projection: ProjectionMap) -> bool | None:
    """Whether a map's weights were counted on text; None if the map does not record its stages."""
    if (projection.row_kind == RowKind.COUNTED).any():
        return True
    stages = {step["stage"] for step in projection.history}
    return False if stages & {"multitoken", "generate"} else None
