"""NeMo-RL's draft "v6", pull request 4177: its tables and its loss, on xtok's spelling maps."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import xtok
from peer_checks import report
from peer_checks.report import Check, Checks
from xtok.maps.nemo_tables import N_MAX, reverse_path
from xtok.maps.spellings import SpellingMap
from xtok.training.losses import ALMConfig, CSDConfig, alm, csd, spelling_index

PARTITION_KL = "_compute_prefix_bidir_partition_kl_v3"
"""The loss's name, which the draft alone has."""

_V3 = "prefix_bidir_v3_"
_CASES: dict[str, tuple[dict[str, Any], CSDConfig | ALMConfig]] = {
    "CSD, KL": ({}, CSDConfig()),
    "CSD, reverse KL, T = 2": (
        {"reverse_kl": True, "temperature": 2.0},
        CSDConfig(reverse_kl=True, temperature=2.0),
    ),
    "CSD, JSD": ({f"{_V3}loss_fn": "jsd", f"{_V3}jsd_beta": 0.3}, CSDConfig(jsd_beta=0.3)),
    "CSD, KL, both places, β = 2, α = 0.5": (
        {
            f"{_V3}position_0_kl": True,
            f"{_V3}mismatch_loss_beta": 2.0,
            f"{_V3}mismatch_pos0_alpha": 0.5,
        },
        CSDConfig(beta=2.0, alpha=0.5),
    ),
    "ALM": ({f"{_V3}pure_alm": True}, ALMConfig()),
}

_LIMITS = {
    "CSD, JSD": 2e-6,  # which the draft computes in float32 of any logits
    "ALM": 1e-5,  # `alm` subtracts 1e-6 from log-likelihoods, as tokenkit does; the draft does not
}


def checks(pair: Any, module: Any) -> Checks:
    """Yield every line about a pair; `module` is the draft's `loss_functions`."""
    draft = _Draft(pair, module)
    for what, check in {
        "tables": draft.tables,
        "maps": draft.maps,
        "losses": draft.losses,
        "collator": pair.collator,
    }.items():
        yield from report.guarded(f"{what}, {pair.label}", check)


class _Draft:
    def __init__(self, pair: Any, module: Any) -> None:
        self.pair, self.module, self.label = pair, module, pair.label
        self.models = [report.own_tokenizer(name, pair.work) for name in pair.names]
        self.path = pair.work / f"{'-'.join(pair.names)}-tables.pt"
        self.spellings = xtok.spellings(*self.models)
        self.spellings.save(self.path)

    def loss(self, changed: dict[str, Any], path: Path | None = None) -> Any:
        config = {
            "temperature": 1.0, "vocab_topk": 8192, "reverse_kl": False, "kl_loss_weight": 1.0,
            "ce_loss_scale": 0.0, "dynamic_loss_scaling": False, "kd_loss_mode": "sum",
            "normalize_teacher_by_vocab": False, "alpha": 1.0, "kl_chunk_shift": True,
            "student_vocab_size": self.spellings.shape[0], "teacher_weights": [1.0],
            "teacher_vocab_sizes": [self.spellings.shape[1]],
            "projection_matrix_paths": [str(path or self.path)],
            "pseudo_target_paths": [str(self.path)],
            "reverse_pseudo_target_paths": [str(reverse_path(self.path))],
            "common_indices_from_subtoks": path is None, **changed,
        }  # fmt: skip
        return self.module.CrossTokenizerDistillationLossFn(config)

    def tables(self) -> Checks:
        """Compare the draft's shared tokens and index with xtok's."""
        m, theirs, device = self.spellings, self.loss({}), torch.device("cpu")
        found = theirs._common_indices_from_subtoks(device, 0)
        same = all(np.array_equal(*both) for both in zip(found, m.shared, strict=True))
        tables = [model.table for model in self.models]
        pairs = list(zip(*(ids.tolist() for ids in found), strict=True))
        wrong = sum(tables[0][s] != tables[1][t] for s, t in pairs if tables[0][s] and tables[1][t])
        figure = f"{len(pairs):,} pairs, the same; {wrong} of unequal bytes"
        what = f"`_common_indices_from_subtoks`, {self.label}"
        yield Check(what, figure, holds=same and not wrong and len(pairs) > 0)
        index = theirs._ensure_bidir_prefix_support_index(device, 0)
        for name, side in (("forward", "student"), ("reverse", "teacher")):
            ours = _by_prefix(m, side)
            figure = (
                f"{sum(map(len, ours.values())):,} tokens under {len(ours):,} prefixes, the same"
            )
            what = f"`_ensure_bidir_prefix_support_index`, {name}, {self.label}"
            yield Check(what, figure, holds=index[name] == ours)

    def maps(self) -> Checks:
        """Their rule for exact rows, weight 1.0 alone, on projection maps."""
        m, theirs = self.spellings, self.loss({}, self.pair.paths["gold"])
        found = theirs._get_common_indices_v3(torch.device("cpu"), 0)
        wrong = sum(
            self.models[0].table[s] != self.models[1].table[t]
            for s, t in zip(*(ids.tolist() for ids in found), strict=True)
            if self.models[0].table[s]
        )
        figure = f"{len(found[0]):,} pairs, {wrong} of unequal bytes"
        yield Check(f"`build_exact_token_map`, --for gold, {self.label}", figure, holds=not wrong)
        theirs = self.loss({}, self.pair.paths["p-kl"])
        logits = [torch.zeros(1, 2, width) for width in m.shape]
        try:
            getattr(theirs, PARTITION_KL)(0, *logits, None, teacher_vocab_size=m.shape[1])
            refusal = "taken without a word"
        except ValueError as error:
            refusal = str(error)
        holds = "the exact 1-to-1 common-vocab map is empty" in refusal
        figure = "refused: it has no exact pairs" if holds else refusal
        yield Check(f"a map --for p-kl, {self.label}", figure, holds)

    def losses(self) -> Checks:
        """Compare the draft's loss with `csd` and `alm`, on logits of whole vocabularies."""
        ids, masks, aligned, logits = self.pair.batch()
        # Tokens without a prediction: the draft compares them by the logits at their own position.
        for row in range(len(ids[0])):
            first = aligned.student_chunk_id[row, 0], aligned.teacher_chunk_id[row, 0]
            for chunk in first:
                if chunk >= 0:
                    aligned.pair_valid[row, chunk] = False
        count = aligned.pair_valid.shape[1]
        spans = self.pair.utils._chunk_ids_to_spans
        localized = self.pair.utils.LocalizedAlignment(
            sample_mask=torch.ones(len(ids[0])),
            student_input_ids=ids[0],
            student_token_mask=masks[0],
            teacher_input_ids=ids[1],
            student_spans=spans(aligned.student_chunk_id, count),
            teacher_spans=spans(aligned.teacher_chunk_id, count),
            num_chunks=aligned.num_chunks,
            pair_valid=aligned.pair_valid,
        )
        shifted = xtok.shift_to_predictions(aligned)
        next_ids = [torch.nn.functional.pad(side[:, 1:], (0, 1)) for side in ids]
        targets = next_ids[0], next_ids[1]
        index, used = spelling_index(self.spellings), {"num_common_chunks": 0}
        for name, (changed, config) in _CASES.items():
            compute = getattr(self.loss(changed), PARTITION_KL)

            def their_loss(student: Tensor, teacher: Tensor, compute: Any = compute) -> Tensor:
                nonlocal used
                width = teacher.shape[-1]
                value, used = compute(0, student, teacher, localized, teacher_vocab_size=width)
                return value  # type: ignore[no-any-return]

            def our_loss(student: Tensor, teacher: Tensor, config: Any = config) -> Tensor:
                if isinstance(config, ALMConfig):
                    return alm(student, teacher, targets, shifted, config)
                return csd(student, teacher, index, targets, shifted, config)

            # In float32, the draft's rest (1 − Σ of up to 100,000 probabilities) is inexact.
            exact = report.value_and_gradient(their_loss, *(side.double() for side in logits))
            chunks = int(used["num_common_chunks"]), int(used["num_mismatch_chunks"])
            ours, own = (report.errors(run, exact, logits) for run in (our_loss, their_loss))
            figure = f"{ours[0]:.0e}, {ours[1]:.0e}; its own {own[0]:.0e}, {own[1]:.0e}"
            what = f"{name}, float32, {self.label}"
            limit = _LIMITS.get(name, 1e-6)
            yield Check(what, figure, holds=max(ours) < limit and min(chunks) > 0)


def _by_prefix(m: SpellingMap, side: str) -> dict[Any, tuple[tuple[int, int], ...]]:
    """Return tokens, with their last pieces, by the number of pieces and all but the last."""
    pieces, counts = getattr(m, f"{side}_pieces").tolist(), getattr(m, f"{side}_counts").tolist()
    index: defaultdict[Any, list[tuple[int, int]]] = defaultdict(list)
    start = 0
    for token_id, count in enumerate(counts):
        spelling = pieces[start : start + count]
        start += count
        if 1 < count <= N_MAX:
            index[count, tuple(spelling[:-1])].append((token_id, spelling[-1]))
    return {key: tuple(tokens) for key, tokens in index.items()}
