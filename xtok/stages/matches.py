"""Tokens of two vocabularies that match: equal bytes, special tokens, near-equivalents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xtok.config import MultitokenConfig
from xtok.maps.edges import Edges, single_edges
from xtok.vocab.relaxed import match_relaxed
from xtok.vocab.roles import match_names, match_roles
from xtok.vocab.table import TokenTable, match_bytes

if TYPE_CHECKING:
    from xtok.tokenizers import Tokenizer


@dataclass(frozen=True)
class ExactMatches:
    """The rows that need no spelling, and those that one near-equivalent settles."""

    equal: Edges  # tokens of equal bytes, weight 1 each
    special: Edges  # special tokens; each row sums to 1
    relaxed: Edges  # of tokens without an exact counterpart, weight 1 each; they keep their slot
    is_exact: NDArray[np.bool_]  # [V_student], the rows of `equal` and `special`


def compared_tables(
    student: Tokenizer, teacher: Tokenizer, config: MultitokenConfig
) -> tuple[TokenTable, TokenTable]:
    """Return both tables in the form that tokens are compared in, without the ignored ids."""
    return (
        student.table_as(config.token_form, ignore=config.ignore_student_ids),
        teacher.table_as(config.token_form, ignore=config.ignore_teacher_ids),
    )


def exact_matches(rows: TokenTable, columns: TokenTable, config: MultitokenConfig) -> ExactMatches:
    """Match the tokens of two tables, which are in the form that they are compared in."""
    equal = single_edges(match_bytes(rows, columns))
    special = special_edges(rows, columns, config)
    is_exact = np.zeros(len(rows), np.bool_)
    is_exact[equal.student_ids] = is_exact[special.student_ids] = True
    return ExactMatches(equal, special, relaxed_edges(rows, columns, config), is_exact)


def special_edges(rows: TokenTable, columns: TokenTable, config: MultitokenConfig) -> Edges:
    """Return the rows of special tokens, each of which sums to 1."""
    if config.special_tokens == "fuzzy":
        pairs = match_names(
            rows, columns, threshold=config.fuzzy_threshold, top_k=config.fuzzy_top_k
        )
        s, t, w = np.array(pairs, np.float64).reshape(-1, 3).T
        return Edges(s.astype(np.int32), t.astype(np.int32), w).normalized()
    return single_edges(match_roles(rows, columns) if config.special_tokens == "roles" else {})


def relaxed_edges(rows: TokenTable, columns: TokenTable, config: MultitokenConfig) -> Edges:
    """Return an edge to each near-equivalent, if they count."""
    relaxed = config.canonicalization == "relaxed"
    return single_edges(match_relaxed(rows, columns) if relaxed else {})


def matching_options(config: MultitokenConfig) -> dict[str, str]:
    """Return the options of matches as a map's history has them."""
    options: dict[str, str] = {"special_tokens": config.special_tokens}
    if config.canonicalization == "relaxed":
        options["canonicalization"] = "relaxed"
    return options
