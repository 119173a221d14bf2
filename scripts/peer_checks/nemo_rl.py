"""NeMo-RL's own loaders, losses, collator and map tools, on xtok's files and with its aligner."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import xtok
from peer_checks import nemo_rl_draft, report
from peer_checks.report import Check, Checks
from xtok.loss_names import BuildLoss
from xtok.training.losses import GoldConfig, PKLConfig, exact_pairs, gold, p_kl
from xtok.training.trainers.nemo_rl import NemoTokenAligner as TokenAligner

PEER = "NeMo-RL"
LEFT_OUT = (
    "The checks ran in one CPU process, without tensor or context parallelism. Stubs replaced "
    "three names of `nemo_rl.models.policy`, `nemo_rl.models.dtensor.parallelize` and "
    "`nemo_rl.utils.logger`. Two tools were not run: `minimal_projection_generator` needs an "
    "embedding model from the hub, and `minimal_projection_via_multitoken` needs 20 GB for a dense "
    "matrix."
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
    module = losses_of(checkout)
    is_draft = hasattr(module.CrossTokenizerDistillationLossFn, nemo_rl_draft.PARTITION_KL)
    for label, names in report.PAIRS.items():
        pair = Pair(checkout, work, label, *names)
        if is_draft:
            yield from nemo_rl_draft.checks(pair, module)
            continue
        for what, check in {
            "the map file": pair.files,
            "losses": pair.losses,
            "collator": pair.collator,
        }.items():
            yield from report.guarded(f"{what}, {label}", check)
    if not is_draft:
        yield from report.guarded("map tools", partial(map_tools, checkout, work))


def losses_of(checkout: Path) -> Any:
    """Import NeMo-RL's losses, with stand-ins for modules that are not needed here."""
    report.stand_in("nemo_rl.models.policy", TokenizerConfig=dict)
    report.stand_in("nemo_rl.models.dtensor.parallelize", to_local_if_dtensor=lambda tensor: tensor)
    report.stand_in("nemo_rl.utils.logger", Logger=object)
    return report.imported(checkout, "nemo_rl.algorithms.loss.loss_functions")


def loss_of(module: Any, path: Path, widths: tuple[int, int], changed: dict[str, Any]) -> Any:
    """Return their loss with a map's `.pt`, as a function of logits and their alignment."""
    config = {
        "gold_loss": False, "xtoken_loss": False, "temperature": 1.0, "vocab_topk": 8192,
        "uncommon_topk": 8192, "reverse_kl": False, "exact_token_match_only": False,
        "kl_loss_weight": 1.0, "ce_loss_scale": 0.0, "dynamic_loss_scaling": False,
        "kd_loss_mode": "sum", "normalize_teacher_by_vocab": False, "alpha": 1.0,
        "student_vocab_size": widths[0], "teacher_vocab_sizes": [widths[1]],
        "projection_matrix_paths": [str(path)], "teacher_weights": [1.0],
        "teacher_gold_loss": [None], "teacher_xtoken_loss": [None], **changed,
    }  # fmt: skip
    made = module.CrossTokenizerDistillationLossFn(config)

    def loss(student: Tensor, teacher: Tensor, aligned: Any) -> Tensor:
        kd, _ = made._compute_teacher_kd(
            0, student, {}, {0: teacher}, {0: aligned}, None,
            use_per_teacher_flags=False, tp_group=None, cp_group=None,
        )  # fmt: skip
        return kd  # type: ignore[no-any-return]

    return loss


class Pair:
    """A pair of real tokenizers, its two maps as `.pt`, and NeMo-RL's modules."""

    def __init__(self, checkout: Path, work: Path, label: str, student: str, teacher: str) -> None:
        self.checkout, self.work, self.label = checkout, work, label
        self.names = student, teacher
        self.tokenizers = [report.auto_tokenizer(name, work) for name in (student, teacher)]
        losses: tuple[BuildLoss, ...] = ("p-kl", "gold")
        self.paths = {loss: report.pt_of(student, teacher, loss, work) for loss in losses}
        self.maps = {loss: xtok.ProjectionMap.load(path) for loss, path in self.paths.items()}
        self.utils = report.imported(checkout, "nemo_rl.algorithms.x_token.loss_utils")

    def files(self) -> Checks:
        """Compare NeMo-RL's loader and exact pairs with the map."""
        for loss, m in self.maps.items():
            sizes = {"student_vocab_size": m.shape[0], "teacher_vocab_size": m.shape[1]}
            matrix = self.utils.get_sparse_projection_matrix(
                str(self.paths[loss]), torch.device("cpu"), **sizes
            )
            kept = matrix.values() != 0  # ids with weight 0 only determine the size of the matrix
            ids = matrix.indices()[:, kept].numpy()
            mine = np.lexsort((m.teacher_ids, m.student_ids))
            same = (
                tuple(matrix.shape) == m.shape
                and np.array_equal(ids[0], m.student_ids[mine])
                and np.array_equal(ids[1], m.teacher_ids[mine])
                and np.allclose(matrix.values()[kept], m.weights[mine], rtol=0, atol=2**-24)
            )
            what = f"`get_sparse_projection_matrix`, --for {loss}, {self.label}"
            yield Check(what, f"{m.nnz:,} entries, to the last bit", holds=same)
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
            yield Check(what, f"{len(ours.student_ids):,} pairs, the same", holds=same)

    def losses(self) -> Checks:
        """Compare NeMo-RL's losses with xtok's, on logits of whole vocabularies for real tokens."""
        module = report.imported(self.checkout, "nemo_rl.algorithms.loss.loss_functions")
        ids, masks, unshifted, logits = self.batch()
        aligned = xtok.shift_to_predictions(unshifted)
        chunks = ("student_chunk_id", "teacher_chunk_id", "pair_valid", "pair_is_correct")
        localized = self.utils.LocalizedAlignment(
            sample_mask=torch.ones(len(ids[0])),
            student_input_ids=ids[0],
            student_token_mask=masks[0],
            **{name: getattr(aligned, name) for name in chunks},
        )
        for name, changed in _LOSSES.items():
            loss: BuildLoss = "gold" if changed.get("gold_loss") else "p-kl"
            made = loss_of(module, self.paths[loss], self.maps[loss].shape, changed)
            their_loss = partial(made, aligned=localized)
            our_loss = self._our_loss(loss, changed, aligned)
            errors = report.errors(our_loss, report.value_and_gradient(their_loss, *logits), logits)
            figure = "{:.0e}, {:.0e}".format(*errors)
            yield Check(f"{name}, float32, {self.label}", figure, holds=max(errors) < 1e-5)
            if changed.get("temperature") or changed.get("reverse_kl"):
                continue
            rounded = [side.bfloat16() for side in logits]
            exact = report.value_and_gradient(their_loss, *(side.float() for side in rounded))
            # Rounded logits have ties, and the order of ties is arbitrary.
            columns = self._pairs(changed).student_ids if loss == "gold" else slice(None)
            ours, own = (
                report.errors(run, exact, rounded, columns) for run in (our_loss, their_loss)
            )
            figure = f"{ours[0]:.0e}, {ours[1]:.0e}; its own {own[0]:.0e}, {own[1]:.0e}"
            holds = ours[0] <= own[0] and ours[1] <= own[1]
            yield Check(f"{name}, bfloat16, {self.label}", figure, holds=holds)

    def batch(self) -> tuple[list[Tensor], list[Tensor], Any, list[Tensor]]:
        """Return real ids and masks of both sides, their alignment, and random logits."""
        texts = [report.text_of(language)[:60] for language in ("german", "chinese")]
        sides = [_padded(tokenizer, texts, 48) for tokenizer in self.tokenizers]
        ids = [side["input_ids"] for side in sides]
        masks = [side["attention_mask"] for side in sides]
        unshifted = self._aligner("gold").align(
            *ids, student_attention_mask=masks[0], teacher_attention_mask=masks[1]
        )
        generator = torch.Generator().manual_seed(1)
        logits = [
            2 * torch.randn(*side.shape, width, generator=generator)
            for side, width in zip(ids, self.maps["gold"].shape, strict=True)
        ]
        return ids, masks, unshifted, logits

    def collator(self) -> Checks:
        """Run NeMo-RL's collator with xtok's aligner."""
        collate = report.imported(self.checkout, _module_of_collator(self.checkout))
        module = report.imported(self.checkout, "nemo_rl.algorithms.x_token.token_aligner")
        aligners = (
            self._aligner("gold"),
            module.TokenAligner(*self.tokenizers, str(self.paths["gold"])),
        )
        same = True
        chunks: tuple[list[int], list[int]] = [], []  # correct chunks, xtok's and NeMo-RL's
        for language in report.LANGUAGES:
            text = report.text_of(language)[:600]
            batch = [
                {"message_log": [{"content": part}], "loss_multiplier": 1.0, "idx": i}
                for i, part in enumerate((text[:300], text[300:]))
            ]
            collated = [
                collate.CrossTokenizerCollator(
                    student_tokenizer=self.tokenizers[0],
                    teacher_tokenizers=[self.tokenizers[1]],
                    aligners=[aligner],
                    ctx_length_student=512,
                    ctx_length_teachers=[512],
                )(batch)
                for aligner in aligners
            ]
            tensors = [
                {
                    key: (value.dtype, value.dim(), value.shape[0])
                    for key, value in one.items()
                    if torch.is_tensor(value)
                }
                for one in collated
            ]
            for found, one in zip(chunks, collated, strict=True):
                correct = one["alignment_0_pair_valid"] & one["alignment_0_pair_is_correct"]
                found.append(int(correct.sum()))
            same &= tensors[0] == tensors[1]
        figure = f"{len(tensors[0])} tensors alike" if same else "keys differ"
        figure += "; {} chunks, {}".format(*("/".join(map(str, found)) for found in chunks))
        holds = same and all(ours >= theirs for ours, theirs in zip(*chunks, strict=True))
        yield Check(f"`CrossTokenizerCollator`, {self.label}", figure, holds)

    def _aligner(self, loss: BuildLoss) -> Any:
        return TokenAligner(
            student_tokenizer=self.tokenizers[0],
            teacher_tokenizer=self.tokenizers[1],
            projection_matrix_path=str(self.paths[loss]),
        )

    def _our_loss(
        self, loss: BuildLoss, changed: dict[str, Any], aligned: Any
    ) -> report.LossFunction:
        names = ("temperature", "reverse_kl", "exact_token_match_only")
        shared = {name: changed[name] for name in names if name in changed}
        if loss == "p-kl":
            config = PKLConfig(top_k=changed.get("vocab_topk", 8192), **shared)
            module = xtok.ProjectionModule(self.maps[loss])
            return lambda student, teacher: p_kl(student, teacher, module, aligned, config)
        pairs = self._pairs(changed)
        return lambda student, teacher: gold(student, teacher, pairs, aligned, GoldConfig(**shared))

    def _pairs(self, changed: dict[str, Any]) -> Any:
        return exact_pairs(self.maps["gold"], threshold=0.6 if changed.get("xtoken_loss") else None)


def _module_of_collator(checkout: Path) -> str:
    """Return the module of their collator, which has moved: it is found by its class."""
    files = sorted((checkout / "nemo_rl" / "data").rglob("*.py"))
    [file] = [f for f in files if "\nclass CrossTokenizerCollator" in f.read_text("utf-8")]
    return ".".join(file.relative_to(checkout).with_suffix("").parts)


def _padded(tokenizer: Any, texts: list[str], length: int) -> dict[str, Tensor]:
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    encoded: dict[str, Tensor] = tokenizer(
        texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt",
        padding_side="right",
    )  # fmt: skip
    return encoded


_WRAPPER = "tools/x_token/build_projection_matrix.sh"
_COMMANDS = {  # their tool, and xtok's command with its options
    "minimal_projection_via_multitoken": "multitoken",
    "reapply_exact_map": "reapply-exact",
    "sort_and_cut_projection_matrix": "sort-cut",
}


def map_tools(checkout: Path, work: Path) -> Checks:
    """Their tools go on from xtok's files, xtok goes on from theirs, and its wrapper runs."""
    folders = [str(report.folder_of(name, work)) for name in ("mistral-v3", "qwen")]
    models = ["--student-model", folders[0], "--teacher-model", folders[1]]
    made = work / "tools"
    made.mkdir(exist_ok=True)
    path = {name: made / f"{name}.pt" for name in ("ours", "theirs", "exact", "cut", "wrapper")}
    their_tools = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}

    def theirs(tool: str, initial: Path, *words: str) -> None:
        command = [sys.executable, "-m", f"tools.x_token.{tool}", *words]
        command += ["--initial-projection-path", str(initial)]
        _run(command, env=their_tools, cwd=checkout)

    def ours(*words: str) -> None:
        _run([sys.executable, "-m", "xtok", *words])

    _, reapply, cut = _COMMANDS
    ours("multitoken", *models, "--output", str(path["ours"]))
    theirs(reapply, path["ours"], *models)
    remapped = made / "ours_exact_map_remapped.pt"
    theirs(cut, remapped, "--top_k", "4", "--output_path", str(path["cut"]))
    m = xtok.ProjectionMap.load(path["cut"], preserve_last=True)
    figure = f"{m.nnz:,} entries, read back by xtok"
    yield Check(f"`{reapply}`, `{cut}` on xtok's .pt", figure, holds=m.nnz > 0)
    theirs(cut, path["ours"], "--top_k", "16", "--output_path", str(path["theirs"]))
    ours("reapply-exact", str(path["theirs"]), *models, "--output", str(path["exact"]))
    ours("sort-cut", str(path["exact"]), "--top-k", "4", "--output", str(path["cut"]))
    m = xtok.ProjectionMap.load(path["cut"])
    figure = f"{m.nnz:,} entries, {int((m.entries_per_row == 0).sum()):,} empty rows"
    yield Check(f"`xtok reapply-exact`, `sort-cut` on the .pt of `{cut}`", figure, m.nnz > 0)

    uv = made / "bin" / "uv"  # the wrapper calls: uv run python -m tools.x_token.TOOL OPTIONS
    uv.parent.mkdir(exist_ok=True)
    cases = "\n".join(f"  tools.x_token.{tool}) set -- {c} ;;" for tool, c in _COMMANDS.items())
    uv.write_text(
        '#!/usr/bin/env bash\nset -e\nmodule=$4; rest=("${@:5}")\n'
        f'case $module in\n{cases}\nesac\nexec {sys.executable} -m xtok "$1" "${{rest[@]}}"\n'
    )
    uv.chmod(0o755)
    command = ["bash", str(checkout / _WRAPPER), *models, "--runtime-top-k", "4"]
    command += ["--data-dir", str(made / "data"), "--final-output", str(path["wrapper"])]
    _run(command, env={**os.environ, "PATH": f"{uv.parent}{os.pathsep}{os.environ['PATH']}"})
    m, built = xtok.ProjectionMap.load(path["wrapper"]), xtok.build(folders[0], folders[1])
    same = all(np.array_equal(*both) for both in zip(m.edges, built.edges, strict=True))
    figure = f"{m.nnz:,} entries, those of `xtok build`" if same else "another map"
    yield Check(f"`{Path(_WRAPPER).name}` with xtok's commands", figure, same)


def _run(command: list[str], **options: Any) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        last = " ".join(done.stderr.strip().splitlines()[-2:])
        raise RuntimeError(f"{' '.join(command[2:4])} ended with {done.returncode}: {last}")
