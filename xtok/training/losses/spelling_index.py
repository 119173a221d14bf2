"""A spelling map on a device: the shared tokens, and a trie of the spellings."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtok._lib.ragged import offsets_of
from xtok.maps.spellings import SpellingMap
from xtok.training.losses.chunks import ChunkTokens
from xtok.training.rows import to_device
from xtok.training.sparse import ranges, true_indices


class CompletionTrie(NamedTuple):
    """A trie that finds tokens of one side by their spellings in tokens (pieces) of the other.

    A token is stored at the node of its spelling without the last piece. Node 0 is the empty
    prefix. Node i + 1 has the key `keys[i]` = (its parent's number) · `width` + (its last piece).
    To find a prefix, search `keys` once for each piece of the prefix.
    """

    keys: Tensor  # int64 [P], ascending
    bounds: Tensor  # int64 [P + 3], start of each node's completions; node P + 1: unknown prefixes
    tokens: Tensor  # int64 [completions], tokens sorted by node, then by id
    pieces: Tensor  # int64 [completions], last piece of each token
    width: int  # vocabulary size of the pieces
    depth: int  # number of pieces in the longest prefix

    def nodes(self, pieces: Tensor, starts: Tensor, sizes: Tensor, longest: int) -> Tensor:
        """Return the node of each of n prefixes, int64 `[n]`; P + 1 for unknown prefixes.

        Prefix i consists of `sizes[i]` ≤ `longest` pieces, from index `starts[i]` in `pieces`.
        """
        none = len(self.keys) + 1
        node = torch.zeros_like(starts).masked_fill_(sizes > self.depth, none)
        for level in range(min(self.depth, longest)):
            is_longer = sizes > level
            key = node * self.width + pieces[(starts + level).clamp(max=len(pieces) - 1)]
            index = torch.searchsorted(self.keys, key).clamp_(max=none - 2)
            following = torch.where(self.keys[index] == key, index + 1, none)
            node = torch.where(is_longer, following, node)
        return node

    def expand(self, nodes: Tensor, counts: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the node's index, the token and the last piece for each completion of n nodes.

        Node i contributes its first `counts[i]` completions, and `total` is the sum of `counts`.
        """
        index, indices = ranges(self.bounds[nodes], counts, total)
        return index, self.tokens[indices], self.pieces[indices]

    def counts(self, nodes: Tensor) -> Tensor:
        """Return the number of completions at each of n nodes."""
        return self.bounds[nodes + 1] - self.bounds[nodes]


class Events(NamedTuple):
    """The events of N chunks. `csd` compares the models' probabilities of the events."""

    singles: Tensor  # int64 [n], chunks with one token on each side
    groups: Tensor  # int64 [G], the other chunks that contribute to the loss
    sizes: tuple[int, int]  # number of tokens in `groups`: student, teacher
    # The e completions of the other chunks, int64 [e], sorted by chunk:
    chunk: Tensor  # index of the chunk in `groups`, ascending
    student: Tensor  # token that replaces the chunk's last student token
    teacher: Tensor  # token that replaces the chunk's last teacher token

    @property
    def num_chunks(self) -> int:
        """Number of chunks that contribute to the loss."""
        return len(self.singles) + len(self.groups)


class SpellingIndex(NamedTuple):
    """A spelling map on a device, for `csd`."""

    student_partner: Tensor  # int64 [V_student], the shared teacher token, or −1
    teacher_partner: Tensor  # int64 [V_teacher]
    student_rest: Tensor  # int64, student tokens that are not shared
    teacher_rest: Tensor
    student_trie: CompletionTrie  # trie of the student's tokens in teacher pieces
    teacher_trie: CompletionTrie
    widths: tuple[int, int]  # (V_student, V_teacher)

    def to(self, device: torch.device | str) -> SpellingIndex:
        """Return the index on a device."""
        return to_device(self, device)

    def events(self, student: ChunkTokens, teacher: ChunkTokens) -> Events:
        """Find the completions of N ≥ 1 chunks: tokens that can replace a chunk's last token."""
        is_one = student.sizes == 1, teacher.sizes == 1
        # [N], whether each chunk has one token per side, and whether the chunk contributes to the
        # loss. A chunk with one token on only one side contributes if the chunk has several
        # completions (below).
        is_single, is_counted = is_one[0] & is_one[1], is_one[0] == is_one[1]
        kinds = is_single, is_counted & ~is_single, is_one[0] & ~is_one[1], is_one[1] & ~is_one[0]
        # Transfer all sizes at once, because each transfer waits for the device.
        sizes = [*(kind.sum() for kind in kinds), student.sizes.amax(), teacher.sizes.amax()]
        *counts, student_longest, teacher_longest = torch.stack(sizes).tolist()
        singles, many, one_student, one_teacher = map(true_indices, kinds, counts)
        prefixed = []
        for trie, spelled, chunks, longest in (
            (self.student_trie, teacher, one_student, teacher_longest - 1),
            (self.teacher_trie, student, one_teacher, student_longest - 1),
        ):
            starts, prefix_sizes = spelled.starts[chunks], spelled.sizes[chunks] - 1
            nodes = trie.nodes(spelled.ids, starts, prefix_sizes, longest)
            several = trie.counts(nodes)
            several = several * (several > 1)  # NeMo-RL's rule: one completion does not count
            is_counted[chunks] = several > 0
            prefixed.append((trie, chunks, nodes, several))
        is_other = is_counted & ~is_single
        other_sizes = (is_other, *(tokens.sizes * is_other for tokens in (student, teacher)))
        sums = [x.sum() for x in (*other_sizes, prefixed[0][3], prefixed[1][3])]
        num_others, num_student, num_teacher, *totals = torch.stack(sums).tolist()
        # If both sides have several tokens, the text's own last tokens are the only completion.
        parts = [(many, student.ids[student.last(many)], teacher.ids[teacher.last(many)])]
        for (trie, chunks, nodes, several), total in zip(prefixed, totals, strict=True):
            index, tokens, pieces = trie.expand(nodes, several, total)
            sides = (tokens, pieces) if trie is self.student_trie else (pieces, tokens)
            parts.append((chunks[index], *sides))
        chunk, student_ids, teacher_ids = (torch.cat(part) for part in zip(*parts, strict=True))
        order, groups = torch.argsort(chunk, stable=True), true_indices(is_other, num_others)
        return Events(
            singles, groups, (num_student, num_teacher),
            torch.searchsorted(groups, chunk[order]), student_ids[order], teacher_ids[order],
        )  # fmt: skip


def spelling_index(spellings: SpellingMap) -> SpellingIndex:
    """Convert a spelling map to an index on the CPU.

    If several tokens have the same spelling, the index contains only the lowest id.
    """
    width, columns = spellings.shape
    partners = [np.full(size, -1, np.int64) for size in spellings.shape]
    student_ids, teacher_ids = spellings.shared
    teacher_ids, first = np.unique(teacher_ids, return_index=True)
    partners[0][student_ids[first]], partners[1][teacher_ids] = teacher_ids, student_ids[first]
    return SpellingIndex(
        student_partner=torch.from_numpy(partners[0]),
        teacher_partner=torch.from_numpy(partners[1]),
        student_rest=torch.from_numpy(np.flatnonzero(partners[0] < 0)),
        teacher_rest=torch.from_numpy(np.flatnonzero(partners[1] < 0)),
        student_trie=_build_trie(spellings.student_pieces, spellings.student_counts, columns),
        teacher_trie=_build_trie(spellings.teacher_pieces, spellings.teacher_counts, width),
        widths=spellings.shape,
    )


def _build_trie(pieces: NDArray[np.int32], counts: NDArray[np.int32], width: int) -> CompletionTrie:
    starts = np.cumsum(counts, dtype=np.int64) - counts
    tokens = np.flatnonzero(counts > 1)
    node, keys, offset = np.zeros(len(tokens), np.int64), [], 0
    depth = int(counts.max(initial=1)) - 1
    for level in range(depth):
        is_longer = np.flatnonzero(counts[tokens] - 1 > level)
        key = node[is_longer] * width + pieces[starts[tokens[is_longer]] + level]
        unique, inverse = np.unique(key, return_inverse=True)
        node[is_longer] = offset + 1 + inverse
        keys.append(unique)
        offset += len(unique)
    last = pieces[starts[tokens] + counts[tokens] - 1].astype(np.int64)
    _, order = np.unique(node * width + last, return_index=True)  # lowest token of each spelling
    order = order[np.lexsort((tokens[order], node[order]))]
    bounds = offsets_of(np.bincount(node[order], minlength=offset + 2))
    return CompletionTrie(
        torch.from_numpy(np.concatenate([*keys, np.zeros(0, np.int64)])), torch.from_numpy(bounds),
        torch.from_numpy(tokens[order]), torch.from_numpy(last[order]), width, depth,
    )  # fmt: skip
