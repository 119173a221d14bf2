"""A spelling map on a device: shared tokens, and tokens by the prefix of their spelling."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtok._lib.ragged import offsets_of
from xtok.maps.spellings import SpellingMap
from xtok.training.losses.picked import Tokens


class Completions(NamedTuple):
    """The tokens of one side by their spelling in the other's pieces, but for its last piece.

    These prefixes are a trie. Node 0 is the empty prefix, and `keys[i]` leads to node i + 1: it is
    the number of the node above · `width` + a piece. So one search a piece finds a prefix, exactly.
    """

    keys: Tensor  # int64 [P], rising
    bounds: Tensor  # int64 [P + 3], where the completions of a node begin; no prefix is node P + 1
    tokens: Tensor  # int64 [completions], by node, then rising
    pieces: Tensor  # int64 [completions], each one's last piece
    width: int  # of the side that spells
    depth: int  # pieces of the longest prefix

    def nodes(self, pieces: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
        """Return the nodes of n prefixes, int64 `[n]`; P + 1 for those that no token has.

        Args:
            pieces: int64, those of all prefixes.
            starts: int64 `[n]`, where a prefix begins in it.
            sizes: int64 `[n]`, of prefixes.
        """
        none = len(self.keys) + 1
        node = torch.zeros_like(starts).masked_fill_(sizes > self.depth, none)
        longest = int(sizes.max()) if len(sizes) else 0
        for level in range(min(self.depth, longest)):
            inside = sizes > level
            key = node * self.width + pieces[(starts + level).clamp(max=len(pieces) - 1)]
            place = torch.searchsorted(self.keys, key).clamp_(max=none - 2)
            following = torch.where(self.keys[place] == key, place + 1, none)
            node = torch.where(inside, following, node)
        return node

    def of(self, nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the completions of n nodes: the place of each one's node, tokens, and pieces."""
        first, counts = self.bounds[nodes], self.counts(nodes)
        place = torch.arange(len(nodes), device=nodes.device).repeat_interleave(counts)
        ends = counts.cumsum(0)
        at = torch.arange(len(place), device=nodes.device) + (first - ends + counts)[place]
        return place, self.tokens[at], self.pieces[at]

    def counts(self, nodes: Tensor) -> Tensor:
        """Return how many completions n nodes have."""
        return self.bounds[nodes + 1] - self.bounds[nodes]

    def to(self, device: torch.device | str) -> Completions:
        """Return the completions on a device."""
        moved: Completions = _moved(self, device)
        return moved


class Events(NamedTuple):
    """What the two sides' predictions are compared on in N chunks."""

    is_single: Tensor  # bool [N], whether a chunk has one token on each side
    is_counted: Tensor  # bool [N]
    # The completions of the other chunks that count, int64 [e] each, by chunk:
    chunk: Tensor
    student: Tensor  # in place of the chunk's last student token
    teacher: Tensor  # in place of its last teacher token


class SpellingIndex(NamedTuple):
    """A spelling map on a device, as `csd` takes it."""

    student_partner: Tensor  # int64 [V_student], the shared teacher token, or −1
    teacher_partner: Tensor  # int64 [V_teacher]
    of_student: Completions  # the student's tokens, by their teacher pieces
    of_teacher: Completions
    widths: tuple[int, int]  # (V_student, V_teacher)

    def to(self, device: torch.device | str) -> SpellingIndex:
        """Return the index on a device."""
        moved: SpellingIndex = _moved(self, device)
        return moved

    def events(self, ours: Tokens, theirs: Tokens) -> Events:
        """Find the completions of chunks by the prefixes that the text has."""
        single = ours.sizes == 1, theirs.sizes == 1
        is_counted = single[0] == single[1]  # shared tokens, or what the text itself says
        both = (~single[0] & ~single[1]).nonzero()[:, 0]
        parts = [(both, ours.ids[ours.last(both)], theirs.ids[theirs.last(both)])]
        for completions, spelled, is_one_sided in (
            (self.of_student, theirs, single[0] & ~single[1]),
            (self.of_teacher, ours, single[1] & ~single[0]),
        ):
            chunks = is_one_sided.nonzero()[:, 0]
            node = completions.nodes(spelled.ids, spelled.starts[chunks], spelled.sizes[chunks] - 1)
            several = completions.counts(node) > 1
            is_counted[chunks] = several
            place, tokens, pieces = completions.of(node[several])
            chunk = chunks[several][place]
            student_is_one = spelled is theirs
            parts.append((chunk, tokens, pieces) if student_is_one else (chunk, pieces, tokens))
        chunk, student, teacher = (torch.cat(part) for part in zip(*parts, strict=True))
        order = torch.argsort(chunk, stable=True)
        return Events(
            single[0] & single[1], is_counted, chunk[order], student[order], teacher[order]
        )


def spelling_index(spellings: SpellingMap) -> SpellingIndex:
    """Return a spelling map's index, on the CPU.

    Of several student tokens that are spelled by one teacher token, the one with the lowest id is
    shared; of several completions by one piece, too.
    """
    width, columns = spellings.shape
    partners = [np.full(size, -1, np.int64) for size in spellings.shape]
    ids, theirs = spellings.shared
    theirs, first = np.unique(theirs, return_index=True)
    partners[0][ids[first]], partners[1][theirs] = theirs, ids[first]
    return SpellingIndex(
        student_partner=torch.from_numpy(partners[0]),
        teacher_partner=torch.from_numpy(partners[1]),
        of_student=_completions(spellings.student_pieces, spellings.student_counts, columns),
        of_teacher=_completions(spellings.teacher_pieces, spellings.teacher_counts, width),
        widths=spellings.shape,
    )


def _completions(pieces: NDArray[np.int32], counts: NDArray[np.int32], width: int) -> Completions:
    """Put the tokens that have several pieces into a trie, a level at a time."""
    starts = np.cumsum(counts, dtype=np.int64) - counts
    tokens = np.flatnonzero(counts > 1)
    node, keys, offset = np.zeros(len(tokens), np.int64), [], 0
    depth = int(counts.max(initial=1)) - 1
    for level in range(depth):
        inside = np.flatnonzero(counts[tokens] - 1 > level)
        key = node[inside] * width + pieces[starts[tokens[inside]] + level]
        unique, number = np.unique(key, return_inverse=True)
        node[inside] = offset + 1 + number
        keys.append(unique)
        offset += len(unique)
    last = pieces[starts[tokens] + counts[tokens] - 1].astype(np.int64)
    _, kept = np.unique(node * width + last, return_index=True)  # the lowest token of each
    kept = kept[np.lexsort((tokens[kept], node[kept]))]
    bounds = offsets_of(np.bincount(node[kept], minlength=offset + 2))
    return Completions(
        keys=torch.from_numpy(np.concatenate([*keys, np.zeros(0, np.int64)])),
        bounds=torch.from_numpy(bounds),
        tokens=torch.from_numpy(tokens[kept]),
        pieces=torch.from_numpy(last[kept]),
        width=width,
        depth=depth,
    )


def _moved(index: Any, device: torch.device | str) -> Any:
    """Return a named tuple with its tensors, and those within, on a device."""
    moved = {name: v.to(device) for name, v in index._asdict().items() if hasattr(v, "to")}
    return index._replace(**moved)
