"""vLLM's token-level intersection for speculative decoding, beside what `xtok convert` writes."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

import xtok
from peer_checks import report
from peer_checks.report import Check, Checks

PEER = "vLLM"
LEFT_OUT = (
    "Of vLLM only `vllm/v1/spec_decode/vocab_mapping.py` is imported, its logger replaced by "
    "Python's: the engine needs a GPU. So a mapping's arrays are compared, not a served model."
)


def checks(checkout: Path, work: Path) -> Checks:
    """Yield every line about a checkout of vLLM."""
    package = report.stand_in("vllm", __path__=[str(checkout / "vllm")])
    for part in ("v1", "v1.spec_decode"):
        path = checkout / "vllm" / part.replace(".", "/")
        report.stand_in(f"{package}.{part}", __path__=[str(path)])
    report.stand_in("vllm.logger", init_logger=logging.getLogger)
    for label, (draft, target) in report.PAIRS.items():
        yield from report.guarded(label, partial(_pair, checkout, work, label, draft, target))


def _pair(checkout: Path, work: Path, label: str, draft: str, target: str) -> Checks:
    """The draft is the student, the target the teacher."""
    module = report.imported(checkout, "vllm.v1.spec_decode.vocab_mapping")
    tokenizers = [report.auto_tokenizer(name, work) for name in (draft, target)]
    student, teacher = sides = [report.own_tokenizer(name, work) for name in (draft, target)]
    widths = [len(side.table) for side in sides]
    theirs = module.VocabMapping(tokenizers[1], tokenizers[0], widths[1], widths[0], "cpu")
    [path] = xtok.convert(
        xtok.build(student, teacher), work / f"{draft}.safetensors", to="vllm-tli"
    )
    ours = load_file(path)
    attributes = ("draft_to_target_ids", "target_to_draft_ids", "intersection_mask_draft")
    same = all(
        ours[name].dtype == getattr(theirs, name).numpy().dtype
        and ours[name].shape == tuple(getattr(theirs, name).shape)
        for name in attributes
    )
    yield Check(f"arrays' names, dtypes, shapes, {label}", "the same three", holds=same)
    rows = {"vLLM": theirs.draft_to_target_ids.numpy(), "xtok": ours["draft_to_target_ids"]}
    wrong = {name: _unequal(ids, sides) for name, ids in rows.items()}
    counts = {name: int((ids >= 0).sum()) for name, ids in rows.items()}
    figure = "; ".join(
        f"{name} {counts[name]:,} pairs, {wrong[name]:,} of unequal bytes" for name in rows
    )
    yield Check(f"pairs, {label}", figure, holds=wrong["xtok"] == 0)
    for language in report.LANGUAGES:
        text = report.text_of(language)
        ids = np.asarray(tokenizers[0](text, add_special_tokens=False)["input_ids"])
        share = {name: float((pairs[ids] >= 0).mean()) for name, pairs in rows.items()}
        figure = "; ".join(f"{name} {one:.1%}" for name, one in share.items())
        holds = share["xtok"] >= share["vLLM"]
        yield Check(f"draft tokens with a pair, {language}, {label}", figure, holds)


def _unequal(draft_to_target: Any, sides: list[xtok.Tokenizer]) -> int:
    """Count pairs of tokens that both stand for text, and not for the same bytes."""
    draft, target = (side.table for side in sides)
    pairs = [(d, int(draft_to_target[d])) for d in np.flatnonzero(draft_to_target >= 0).tolist()]
    return sum(draft[d] != target[t] for d, t in pairs if draft[d] and target[t])
