"""NeMo-RL's own loaders, losses, collator and map tools, on xtok's files and with its aligner."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import xtok
from peer_checks.report import (
    LANGUAGES,
    PAIRS,
    Check,
    Checks,
    auto_tokenizer,
    folder_of,
    guarded,
    imported,
    relative,
    stand_in,
    text_of,
    value_and_gradient,
)
from xtok.config import Loss
from xtok.training.losses import GoldConfig, PKLConfig, exact_pairs, gold, p_kl

PEER = "NeMo-RL"
LEFT_OUT = (
    "`nemo_rl.models.policy`, `nemo_rl.models.dtensor.parallelize` and `nemo_rl.utils.logger` need "
    "vLLM, Hydra and loggers; of them the losses use three names, which stand-ins give. Losses run "
    "on one CPU process, without tensor or context parallelism. The shell wrapper runs as it is, "
    "but for `uv`."
)
_LOSSES: dict[str, dict[str, Any]] = {
    "P-KL": {},
    "P-KL, 512 tokens, T = 2": {"vocab_topk": 512, "temperature": 2.0},
    "P-KL, reverse": {"reverse_kl": True},
    "P-KL, correct chunks only": {"exact_token_match_only": True},
    "gold": {"gold_loss": True},
    "gold, reverse, T = 2": {"gold_loss": True, "reverse_kl": True, "temperature": 2.0},
    "H-KL": {"gold_loss": True, "xtoken_loss": True},
    "H-KL, T = 2": {"gold_loss": True, "xtoken_loss": True, "temperature": 2.0},
}


def checks(checkout: Path, work: Path) -> Checks:
    """Yield every line about a checkout of NeMo-RL."""
    stand_in("nemo_rl.models.policy", TokenizerConfig=dict)
    stand_in("nemo_rl.models.dtensor.parallelize", to_local_if_dtensor=lambda tensor: tensor)
    stand_in("nemo_rl.utils.logger", Logger=object)
    for label, names in PAIRS.items():
        pair = Pair(checkout, work, label, *names)
        for what, check in {
            "the map file": pair.files,
            "losses": pair.losses,
            "collator": pair.collator,
        }.items():
            yield from guarded(PEER, f"{what}, {label}", check)
    yield from guarded(PEER, "map tools", partial(map_tools, checkout, work))


class Pair:
    """A pair of real tokenizers, its two maps as `.pt`, and NeMo-RL's modules."""

    def __init__(self, checkout: Path, work: Path, label: str, student: str, teacher: str) -> None:
        self.checkout, self.label = checkout, label
        self.tokenizers = [auto_tokenizer(name, work) for name in (student, teacher)]
        rows, columns = (str(folder_of(name, work)) for name in (student, teacher))
        losses: tuple[Loss, ...] = ("p-kl", "gold")
        self.paths = {loss: work / f"{student}-{teacher}-{loss}.pt" for loss in losses}
        for loss, path in self.paths.items():
            if not path.exists():
                xtok.build(rows, columns, for_loss=loss).save(path)
        self.maps = {loss: xtok.ProjectionMap.load(path) for loss, path in self.paths.items()}
        self.utils = imported(checkout, "nemo_rl.algorithms.x_token.loss_utils")

    def files(self) -> Checks:
        """Their loader and their exact pairs beside the map."""
        for loss, m in self.maps.items():
            sizes = {"student_vocab_size": m.shape[0], "teacher_vocab_size": m.shape[1]}
            matrix = self.utils.get_sparse_projection_matrix(
                str(self.paths[loss]), torch.device("cpu"), **sizes
            )
            kept = matrix.values() != 0  # ids with weight 0 only give the matrix its size
            ids = matrix.indices()[:, kept].numpy()
            mine = np.lexsort((m.teacher_ids, m.student_ids))
            same = (
                tuple(matrix.shape) == m.shape
                and np.array_equal(ids[0], m.student_ids[mine])
                and np.array_equal(ids[1], m.teacher_ids[mine])
                and np.array_equal(matrix.values()[kept].numpy(), m.weights[mine])
            )
            what = f"`get_sparse_projection_matrix`, --for {loss}, {self.label}"
            yield Check(PEER, what, f"{m.nnz:,} entries, bit for bit", holds=same)
        m = self.maps["gold"]
        for strict, threshold in ((True, None), (False, 0.6)):
            theirs = self.utils.build_exact_token_map(
                str(self.paths["gold"]), torch.device("cpu"),
                xtoken_loss=not strict, teacher_vocab_size=m.shape[1],
            )  # fmt: skip
            ours = exact_pairs(m, threshold=threshold)
            same = torch.equal(ours.student_ids, theirs["common_student"]) and torch.equal(
                ours.teacher_ids, theirs["common_teacher"]
            )
            what = f"`build_exact_token_map`, {'strict' if strict else '≥ 0.6'}, {self.label}"
            yield Check(PEER, what, f"{len(ours.student_ids):,} pairs, the same", holds=same)

    def losses(self) -> Checks:
        """Their losses beside ours, on logits of the whole vocabularies for real tokens."""
        module = imported(self.checkout, "nemo_rl.algorithms.loss.loss_functions")
        texts = [text_of(language)[:60] for language in ("german", "chinese")]
        sides = [_padded(tokenizer, texts, 48) for tokenizer in self.tokenizers]
        aligned = xtok.shift_to_predictions(
            self._aligner("gold").align(
                sides[0]["input_ids"],
                sides[1]["input_ids"],
                student_attention_mask=sides[0]["attention_mask"],
                teacher_attention_mask=sides[1]["attention_mask"],
            )
        )
        localized = self.utils.LocalizedAlignment(
            sample_mask=torch.ones(len(texts)),
            student_input_ids=sides[0]["input_ids"],
            student_token_mask=sides[0]["attention_mask"],
            **{
                name: getattr(aligned, name)
                for name in (
                    *("student_chunk_id", "teacher_chunk_id"),
                    *("pair_valid", "pair_is_correct"),
                )
            },
        )
        generator = torch.Generator().manual_seed(1)
        student, teacher = (
            2 * torch.randn(*side["input_ids"].shape, width, generator=generator)
            for side, width in zip(sides, self.maps["gold"].shape, strict=True)
        )
        for name, changed in _LOSSES.items():
            loss: Loss = "gold" if changed.get("gold_loss") else "p-kl"
            theirs = module.CrossTokenizerDistillationLossFn(self._config(loss, changed))

            def their_loss(logits: Tensor, theirs: Any = theirs) -> Tensor:
                kd, _ = theirs._compute_teacher_kd(
                    0, logits, {}, {0: teacher.to(logits.dtype)}, {0: localized}, None,
                    use_per_teacher_flags=False, tp_group=None, cp_group=None,
                )  # fmt: skip
                return kd  # type: ignore[no-any-return]

            our_loss = partial(self._our_loss, loss, changed, teacher=teacher, aligned=aligned)
            exact = value_and_gradient(their_loss, student)
            found = value_and_gradient(our_loss, student)
            value, gradient = (relative(o, t) for o, t in zip(found, exact, strict=True))
            figure = f"value {value:.0e}, gradient {gradient:.0e} apart"
            holds = value < 1e-5 and gradient < 1e-5
            yield Check(PEER, f"{name}, float32, {self.label}", figure, holds=holds)
            if changed.get("temperature") or changed.get("reverse_kl"):
                continue
            rounded = student.bfloat16()
            errors = [
                [
                    relative(o, t)
                    for o, t in zip(value_and_gradient(run, rounded), exact, strict=True)
                ]
                for run in (our_loss, their_loss)
            ]
            figure = (
                f"from its float32: xtok's value {errors[0][0]:.0e}, gradient {errors[0][1]:.0e}; "
                f"its own {errors[1][0]:.0e}, {errors[1][1]:.0e}"
            )
            holds = all(ours <= theirs for ours, theirs in zip(*errors, strict=True))
            yield Check(PEER, f"{name}, bfloat16, {self.label}", figure, holds=holds)

    def collator(self) -> Checks:
        """Their collator with xtok's aligner in the place of its own."""
        collate = imported(self.checkout, "nemo_rl.data.cross_tokenizer_collate")
        their_aligner = imported(self.checkout, "nemo_rl.algorithms.x_token.token_aligner")
        aligners = {
            "xtok": self._aligner("gold"),
            PEER: their_aligner.TokenAligner(*self.tokenizers, str(self.paths["gold"])),
        }
        for language in LANGUAGES:
            text = text_of(language)[:600]
            batch = [
                {"message_log": [{"content": part}], "loss_multiplier": 1.0, "idx": i}
                for i, part in enumerate((text[:300], text[300:]))
            ]
            found = {}
            for name, aligner in aligners.items():
                found[name] = collate.CrossTokenizerCollator(
                    student_tokenizer=self.tokenizers[0],
                    teacher_tokenizers=[self.tokenizers[1]],
                    aligners=[aligner],
                    ctx_length_student=512,
                    ctx_length_teachers=[512],
                )(batch)
            shapes = [
                {
                    key: (value.dtype, value.dim(), value.shape[0])
                    for key, value in one.items()
                    if torch.is_tensor(value)
                }
                for one in found.values()
            ]
            same = shapes[0] == shapes[1]
            correct = [int(_correct_chunks(one).sum()) for one in found.values()]
            figure = f"{len(shapes[0])} tensors, same keys and dtypes" if same else "keys differ"
            figure += f"; correct chunks: xtok {correct[0]}, NeMo-RL {correct[1]}"
            holds = same and correct[0] >= correct[1]
            yield Check(PEER, f"`CrossTokenizerCollator`, {language}, {self.label}", figure, holds)

    def _aligner(self, loss: Loss) -> Any:
        return xtok.TokenAligner(
            student_tokenizer=self.tokenizers[0],
            teacher_tokenizer=self.tokenizers[1],
            projection_matrix_path=str(self.paths[loss]),
        )

    def _config(self, loss: Loss, changed: dict[str, Any]) -> dict[str, Any]:
        widths = self.maps[loss].shape
        return {
            "gold_loss": False, "xtoken_loss": False, "temperature": 1.0, "vocab_topk": 8192,
            "uncommon_topk": 8192, "reverse_kl": False, "exact_token_match_only": False,
            "kl_loss_weight": 1.0, "ce_loss_scale": 0.0, "dynamic_loss_scaling": False,
            "kd_loss_mode": "sum", "normalize_teacher_by_vocab": False, "alpha": 1.0,
            "student_vocab_size": widths[0], "teacher_vocab_sizes": [widths[1]],
            "projection_matrix_paths": [str(self.paths[loss])], "teacher_weights": [1.0],
            "teacher_gold_loss": [None], "teacher_xtoken_loss": [None], **changed,
        }  # fmt: skip

    def _our_loss(
        self, loss: Loss, changed: dict[str, Any], logits: Tensor, *, teacher: Tensor, aligned: Any
    ) -> Tensor:
        m, teacher = self.maps[loss], teacher.to(logits.dtype)
        shared = {
            name: changed[name]
            for name in ("temperature", "reverse_kl", "exact_token_match_only")
            if name in changed
        }
        if loss == "p-kl":
            config = PKLConfig(top_k=changed.get("vocab_topk", 8192), **shared)
            return p_kl(logits, teacher, xtok.ProjectionModule(m), aligned, config)
        if changed.get("xtoken_loss"):
            pairs = exact_pairs(m, threshold=0.6)
            return gold(logits, teacher, pairs, aligned, GoldConfig(**shared))
        return gold(logits, teacher, exact_pairs(m), aligned, GoldConfig(**shared))


def _padded(tokenizer: Any, texts: list[str], length: int) -> dict[str, Tensor]:
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    encoded: dict[str, Tensor] = tokenizer(
        texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt",
        padding_side="right",
    )  # fmt: skip
    return encoded


def _correct_chunks(batch: Any) -> Tensor:
    both: Tensor = batch["alignment_0_pair_valid"] & batch["alignment_0_pair_is_correct"]
    return both


_WRAPPER = "tools/x_token/build_projection_matrix.sh"
_TOOLS = (
    "minimal_projection_via_multitoken",
    "reapply_exact_map",
    "sort_and_cut_projection_matrix",
)


def map_tools(checkout: Path, work: Path) -> Checks:
    """Their tools go on from xtok's files, xtok goes on from theirs, and its wrapper runs."""
    folders = [str(folder_of(name, work)) for name in ("mistral-v3", "qwen")]
    models = ["--student-model", folders[0], "--teacher-model", folders[1]]
    ours = work / "tools"
    ours.mkdir(exist_ok=True)
    first = ours / "ours.pt"
    _run_xtok("multitoken", *models, "--output", str(first))
    _run_tool(checkout, _TOOLS[1], *models, "--initial-projection-path", str(first))
    continued = first.with_name("ours_exact_map_remapped.pt")
    cut = ours / "cut.pt"
    _run_tool(
        checkout, _TOOLS[2], "--initial-projection-path", str(continued),
        "--top_k", "4", "--output_path", str(cut),
    )  # fmt: skip
    read = xtok.ProjectionMap.load(cut, preserve_last=True)
    figure = f"{read.nnz:,} entries, read back by xtok"
    yield Check(PEER, f"`{_TOOLS[1]}`, `{_TOOLS[2]}` on xtok's .pt", figure, read.nnz > 0)
    theirs = ours / "theirs.pt"
    refined = [ours / "exact.pt", ours / "final.pt"]
    _run_tool(checkout, _TOOLS[2], "--initial-projection-path", str(first), "--top_k", "16",
              "--output_path", str(theirs))  # fmt: skip
    _run_xtok("reapply-exact", str(theirs), *models, "--output", str(refined[0]))
    _run_xtok("sort-cut", str(refined[0]), "--top-k", "4", "--output", str(refined[1]))
    read = xtok.ProjectionMap.load(refined[1])
    figure = f"{read.nnz:,} entries, {int((read.entries_per_row == 0).sum()):,} empty rows"
    yield Check(PEER, "`xtok reapply-exact`, `sort-cut` on its .pt", figure, read.nnz > 0)
    yield from _wrapper(checkout, ours, models)


def _wrapper(checkout: Path, ours: Path, models: list[str]) -> Iterator[Check]:
    """Their shell wrapper, with xtok's commands where it calls its modules."""
    uv = ours / "bin" / "uv"  # the wrapper calls: uv run python -m tools.x_token.TOOL OPTIONS
    uv.parent.mkdir(exist_ok=True)
    commands = dict(zip(_TOOLS, ("multitoken", "reapply-exact", "sort-cut"), strict=True))
    cases = "\n".join(f"  tools.x_token.{tool}) set -- {c} ;;" for tool, c in commands.items())
    uv.write_text(
        '#!/usr/bin/env bash\nset -e\nmodule=$4; rest=("${@:5}")\n'
        f'case $module in\n{cases}\nesac\nexec {sys.executable} -m xtok "$1" "${{rest[@]}}"\n'
    )
    uv.chmod(0o755)
    final = ours / "wrapper.pt"
    environment = {**os.environ, "PATH": f"{uv.parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(checkout / _WRAPPER), *models, "--runtime-top-k", "4"]
    command += ["--data-dir", str(ours / "data"), "--final-output", str(final)]
    _run(command, env=environment)
    built = xtok.build(models[1], models[3])
    read = xtok.ProjectionMap.load(final)
    same = (
        np.array_equal(read.student_ids, built.student_ids)
        and np.array_equal(read.teacher_ids, built.teacher_ids)
        and np.array_equal(read.weights, built.weights)
    )
    figure = f"{read.nnz:,} entries, those of `xtok build`" if same else "another map"
    yield Check(PEER, f"`{Path(_WRAPPER).name}` with xtok's commands", figure, same)


def _run_xtok(*words: str) -> None:
    _run([sys.executable, "-m", "xtok", *words])


def _run_tool(checkout: Path, tool: str, *words: str) -> None:
    """Run one of their tools as a process, as their wrapper does."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    _run([sys.executable, "-m", f"tools.x_token.{tool}", *words], env=environment, cwd=checkout)


def _run(command: list[str], **options: Any) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise RuntimeError(f"{' '.join(command[1:4])} ended with {done.returncode}: {last}")
