"""Train a student on policy with TRL through `xtok serve`, and measure the result.

    python scripts/examples/live_trl.py --texts de.train.jsonl.gz --held-out de.valid.jsonl.gz \
        --work runs/policy --credit prefix

The student continues the beginnings of texts, and learns from the teacher's predictions of its
tokens. `--teacher-url` selects the teacher's server; by default the script starts one with
Transformers. For comparison, `--writer text` trains off policy on the texts' own continuations,
`--text-weight 1` adds cross-entropy on the whole texts, and `--weight 0` removes TRL's loss.
`--credit equal` divides the log-probability of a chunk equally among the student's tokens.

Measured before training, half-way and at the end: bits per byte of held-out texts; the reverse KL
on sampled continuations, in bits per byte; and greedy continuations, with the share of tokens that
end a repeated sequence of three. `results.jsonl` in the work folder contains one line per
measurement; `--report` prints them as a table.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import study
import torch
from study_data import beginning, sides, texts_of

from xtok.training import DistillationCollator, logits_of, losses, prepare

TEXT = "The lighthouse was built in 1852 — its lamp, 201 steps up, burned whale oil until 1886."
NEW_TOKENS = 32
SAMPLES = 2  # of each held-out prompt
MEASUREMENTS = 2  # of a run, evenly
OF_RUN = (
    "credit", "writer", "beta", "weight", "text_weight", "learning_rate", "batch_size", "seed"
)  # fmt: skip

# The command with equal shares: nothing is known of how the teacher goes on inside a chunk.
EQUAL = """
import numpy, xtok.teachers.projector as projector
projector.prefix_weights = lambda aligner, student, *_: numpy.ones(len(student.ids))
from xtok.__main__ import program
program()
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Train a student, unless only the report is asked for, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    for name in ("texts", "held-out", "work"):
        add(f"--{name}", type=Path, required=True)
    for name, folder in (("student", "smollm2-135m"), ("teacher", "gemma3-270m")):
        add(f"--{name}", default=str(study.DATA / folder), help="default: %(default)s")
    add("--teacher-url", help="its server; default: one of Transformers, started here")
    add("--credit", choices=("prefix", "equal"), default="prefix")
    add("--writer", choices=("student", "text"), default="student", help="of what is scored")
    add("--weight", type=float, default=1.0, help="of TRL's loss")
    add("--text-weight", type=float, default=0.0, help="of cross-entropy on the whole texts")
    add("--beta", type=float, default=1.0, help="TRL's: 1 is reverse KL, 0 forward KL of 16")
    add("--steps", type=int, default=100)
    add("--batch-size", type=int, default=4)
    add("--learning-rate", type=float, default=2e-5)
    add("--seed", type=int, default=0)
    add("--autocast", action="store_true", help="bfloat16, where the processor has it")
    add("--report", action="store_true", help="only show the results so far")
    args = parser.parse_args(argv)
    if not args.report:
        args.work.mkdir(parents=True, exist_ok=True)
        with served(args) as (url, teacher_url):
            compare(args, url, teacher_url)
            train(args, url)
    report(args.work)


@contextmanager
def served(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Start the servers; yield the addresses of `xtok serve` and of the teacher's own."""
    with started([str(Path(__file__).with_name("teacher_server.py")), args.teacher, "--port", "0"],
                 args.teacher_url) as teacher_url:  # fmt: skip
        program = ["-c", EQUAL] if args.credit == "equal" else ["-m", "xtok"]
        serve = ["serve", args.student, args.teacher, "--teacher-url", teacher_url, "--port", "0"]
        with started([*program, *serve]) as url:
            yield url, teacher_url


@contextmanager
def started(command: Sequence[str], running: str | None = None) -> Iterator[str]:
    """Run a server with this Python unless one is running; yield its address."""
    if running is not None:
        yield running
        return
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().strip() if server.stdout else ""
            if not url:
                raise SystemExit(f"{command[-1]}: the server has ended")
            yield url
        finally:
            server.terminate()


def compare(args: argparse.Namespace, url: str, teacher_url: str) -> None:
    """Print the log-probability of one text from both servers; they agree after the first token."""
    pair = sides(args.student, args.teacher)
    student, teacher = pair.tokenizers
    ids = student.encode(TEXT).ids.tolist()
    bos = list(teacher.table.roles.get("bos", ())[:1])
    asked = [*bos, *teacher.segment(TEXT)]
    [values], [theirs] = own(url, [ids]), own(teacher_url, [asked])
    first = len(teacher.segment(student.table[ids[0]]))  # of the student's first token
    print(
        f"{len(ids)} student tokens, {len(asked)} of the teacher's: {sum(values):.4f} nats after "
        f"the first token, the teacher's own server says {sum(theirs[first:]):.4f}"
    )


def own(url: str, sequences: list[list[int]]) -> list[list[float]]:
    """Return the log-probability of each token of sequences after the first."""
    found = []
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    for ids in sequences:
        body = {"model": model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 1}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
        response.raise_for_status()
        rows = response.json()["choices"][0]["prompt_logprobs"]
        found.append([rows[n][str(i)]["logprob"] for n, i in enumerate(ids) if n])
    return found


def train(args: argparse.Namespace, url: str) -> None:
    """Train on continuations by the student or by the texts, and append the measurements."""
    from transformers import AutoTokenizer, TrainerCallback

    tokenizer = AutoTokenizer.from_pretrained(args.student)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    collate = DistillationCollator(*sides(args.student, args.teacher).tokenizers, bos=False)
    trainer = trainer_of(args, url, tokenizer, collate)
    held_out = texts_of(args.held_out, 0, study.HELD_OUT, one_each=True)
    prompts = [*map(beginning, held_out)]
    measured_at = [args.steps * i // MEASUREMENTS for i in range(MEASUREMENTS + 1)]
    begun, seconds = 0.0, list[float]()

    def measure(step: int) -> None:
        line = {
            **{name: getattr(args, name) for name in OF_RUN}, "step": step,
            "seconds": float(np.median(seconds)) if seconds else 0.0,
            "bits": study.bits(trainer.model, held_out, collate),
            "bytes": [len(text.encode()) for text in held_out],
            **reverse_kl(trainer.model, tokenizer, url, prompts, collate.student.table.lengths),
            **greedy(trainer.model, tokenizer, prompts),
        }  # fmt: skip
        with (args.work / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"step {step}: {rate(line):.3f} bits per byte, reverse KL {rate(line, 'kl'):.3f}",
              flush=True)  # fmt: skip

    class Measure(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            nonlocal begun
            begun = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds.append(time.perf_counter() - begun)
            if state.global_step in measured_at:
                measure(state.global_step)

    trainer.add_callback(Measure())
    measure(0)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print("losses:", " ".join(f"{loss:.3f}" for loss in losses))
    if not all(map(math.isfinite, losses)):
        raise SystemExit("a loss is not finite")


def trainer_of(
    args: argparse.Namespace, url: str, tokenizer: Any, collate: DistillationCollator
) -> Any:
    """Return TRL's trainer, optionally off policy and with additional cross-entropy."""
    from datasets import Dataset
    from trl.experimental.server_distillation import (
        ServerDistillationConfig,
        ServerDistillationTrainer,
    )
    from trl.generation import vllm_client

    vllm_client.is_vllm_available = lambda *_: True  # it moves weights, which is not asked for
    texts = texts_of(args.texts, args.seed, args.steps * args.batch_size)
    begun_by = {tuple(tokenizer(beginning(text)).input_ids): text for text in texts}

    class Trainer(ServerDistillationTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **more: Any) -> Any:
            if args.writer == "student":
                return super()._generate_single_turn(prompt_ids, *rest, **more)
            whole = [begun_by[tuple(ids)] for ids in prompt_ids]
            ends = [text.removeprefix(beginning(text)) for text in whole]
            return [tokenizer(end).input_ids[:NEW_TOKENS] for end in ends]

        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            loss = 0.0
            if args.weight:
                loss = args.weight * super().compute_loss(model, inputs, *rest, **more)
            if args.text_weight:
                both = zip(inputs["prompt_ids"], inputs["prompt_mask"].bool(), strict=True)
                whole = [begun_by[tuple(ids[mask].tolist())] for ids, mask in both]
                batch = prepare(collate(whole), model.device)
                own = losses.cross_entropy(logits_of(model, batch), batch["targets"])
                loss = loss + args.text_weight * own
            return loss

    config = ServerDistillationConfig(
        output_dir=str(args.work / "trl"), teacher_model_server_url=url, beta=args.beta,
        loss_top_k=1 if args.beta else 16, max_steps=args.steps, logging_steps=1,
        per_device_train_batch_size=args.batch_size, max_completion_length=NEW_TOKENS,
        learning_rate=args.learning_rate, lr_scheduler_type="constant", seed=args.seed,
        bf16=args.autocast, use_cpu=not torch.cuda.is_available(), gradient_checkpointing=False,
        report_to="none", disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    return Trainer(
        args.student, args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": beginning(text)} for text in texts]),
    )  # fmt: skip


@torch.no_grad()
def reverse_kl(
    model: Any, tokenizer: Any, url: str, prompts: list[str], lengths: Any
) -> dict[str, Any]:
    """Sample continuations of prompts; return the student's bits minus the teacher's.

    Returns:
        `kl` and `kl_bytes`, for each prompt, summed over its samples.
    """
    model.eval()
    bits, num_bytes = np.zeros(len(prompts)), np.zeros(len(prompts), int)
    given = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    both = zip(given["input_ids"], given["attention_mask"].bool(), strict=True)
    asked = [ids[mask].tolist() for ids, mask in both]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(SAMPLES):
            made = model.generate(
                **given.to(model.device), max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            logprobs = torch.stack(made.logits, 1).float().log_softmax(-1)
            new = made.sequences[:, given["input_ids"].shape[1] :].tolist()
            written = [until(ids, tokenizer.eos_token_id) for ids in new]
            sequences = [[*x, *y] for x, y in zip(asked, written, strict=True)]
            for n, theirs in enumerate(own(url, sequences)):
                ours = logprobs[n, range(len(written[n])), written[n]].sum()
                bits[n] += (float(ours) - sum(theirs[len(asked[n]) - 1 :])) / math.log(2)
                num_bytes[n] += int(lengths[written[n]].sum())
    model.train()
    return {"kl": bits.tolist(), "kl_bytes": num_bytes.tolist()}


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, prompts: list[str]) -> dict[str, Any]:
    """Return the student's greedy continuations of prompts.

    Returns:
        `greedy`, the texts, and `repeated`, the share of the tokens of each that end three which
        were there before.
    """
    model.eval()
    texts, shares = [], []
    for prompt in prompts:
        given = tokenizer(prompt, return_tensors="pt").to(model.device)
        made = model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
        new = made[given["input_ids"].shape[1] :]
        threes = [*zip(new, new[1:], new[2:], strict=False)]
        shares.append(1 - len(set(threes)) / max(1, len(threes)))
        texts.append(tokenizer.decode(until(new, tokenizer.eos_token_id)))
    model.train()
    return {"greedy": texts, "repeated": shares}


def until(ids: list[int], end: int | None) -> list[int]:
    """Return ids up to the first that ends a text."""
    return ids[: ids.index(end) + 1] if end in ids else ids


def rate(line: dict[str, Any], what: str = "bits", drawn: Any = slice(None)) -> Any:
    """Return a measurement in bits per byte, of all texts or of those drawn."""
    num_bytes = line["bytes" if what == "bits" else "kl_bytes"]
    return np.array(line[what])[drawn].sum(-1) / np.array(num_bytes)[drawn].sum(-1)


def report(work: Path) -> None:
    """Print a table with one row per run: the reductions between start and end.

    Brackets contain 95 % intervals over held-out texts (bootstrap). Then print three continuations.
    """
    lines = [json.loads(line) for line in (work / "results.jsonl").open(encoding="utf-8")]
    runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        runs.setdefault(tuple(line[name] for name in OF_RUN), []).append(line)
    print("| credit | writer | beta | weight | text | rate | steps | bits per byte | less | "
          "reverse KL | less | repeated | seconds a step |\n" + "|---" * 13 + "|")  # fmt: skip
    for measured in runs.values():
        first, last = measured[0], measured[-1]
        drawn = np.random.default_rng(0).integers(
            len(first["bits"]), size=(2000, len(first["bits"]))
        )
        shown = [last["credit"], last["writer"], *(f"{last[name]:g}" for name in OF_RUN[2:6])]
        shown.append(", ".join(str(x["step"]) for x in measured))
        for what in ("bits", "kl"):
            less = rate(first, what, drawn) - rate(last, what, drawn)
            low, high = np.quantile(less, (0.025, 0.975))
            shown.append(", ".join(f"{rate(line, what):.3f}" for line in measured))
            gain = rate(first, what) - rate(last, what)
            shown.append(f"{gain:.3f} ({low:.3f} to {high:.3f})")
        shown.append(", ".join(f"{np.mean(line['repeated']):.2f}" for line in measured))
        print(f"| {' | '.join(shown)} | {last['seconds']:.1f} |")
    for measured in runs.values():
        print("\n" + " ".join(f"{measured[-1][name]}" for name in OF_RUN[:6]))
        for line in (measured[0], measured[-1]):
            for text in line["greedy"][:3]:
                print(f"  {line['step']}: {text!r}")


if __name__ == "__main__":
    main()
