"""Which losses a map suits, by the map alone."""

from __future__ import annotations

from xtok.maps.projection_map import ProjectionMap, RowKind
from xtok.tokenizers.display import percent, plural

H_KL_THRESHOLD = 0.6
"""The least weight that makes a row a pair for H-KL (NeMo-RL)."""


def p_kl_problems(projection: ProjectionMap) -> list[str]:
    """Return what keeps a map's rows from being the probabilities that P-KL takes them for."""
    slots, exact = projection.weights[projection.is_slot], exact_rows(projection)
    problems = []
    if len(slots):
        problems.append(
            f"a scale slot takes {percent(float(slots.mean()), 0)} of {plural(len(slots), 'row')}"
        )
    if exact:
        problems.append(
            f"{plural(exact, 'exact row')} put all weight on one token, though the teacher may "
            "begin a longer one there"
        )
    if is_counted(projection) is False:
        problems.append("weights were not counted")
    return problems


def exact_rows(projection: ProjectionMap) -> int:
    """Return how many rows are exact; of a map with tokens, only of those with bytes."""
    is_exact = projection.row_kind == RowKind.EXACT
    if projection.student.table is not None:
        is_exact = is_exact & (projection.student.table.lengths > 0)
    return int(is_exact.sum())


def is_counted(projection: ProjectionMap) -> bool | None:
    """Whether a map's weights were counted; None for a map whose history is not known."""
    if (projection.row_kind == RowKind.COUNTED).any():
        return True
    stages = {step["stage"] for step in projection.history}
    return False if stages & {"multitoken", "generate"} else None
