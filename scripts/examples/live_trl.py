"""Teach a student on policy with TRL from a teacher behind `xtok serve`, and say what came of it.

    python scripts/examples/live_trl.py http://127.0.0.1:8100 http://127.0.0.1:8000 \
        --student data/models/smollm2-135m --teacher data/models/gemma3-270m

`scripts/live_vllm.sh` starts the servers before. The first address is xtok's, the second the
teacher's own.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import httpx

import xtok

TEXT = "The lighthouse was built in 1852 — its lamp, 201 steps up, burned whale oil until 1886."
PROMPTS = (
    "The lighthouse keeper wrote in his log that",
    "To bake bread, you first",
    "In the year 2014, the city of",
    "The difference between a frog and a toad is",
)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Compare the sums of one text, then train; return the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("teacher_url")
    parser.add_argument("--student", required=True)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args(argv)
    wait_for(options.url)
    compare(options)
    losses = train(options)
    if not all(map(math.isfinite, losses)):
        raise SystemExit(f"a loss is not finite: {losses}")
    return losses


def wait_for(url: str) -> None:
    """Wait until a server answers, for ten minutes at most."""
    for _ in range(600):
        try:
            if httpx.get(f"{url}/health", timeout=10).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise SystemExit(f"{url} does not answer")


def compare(options: Any) -> None:
    """Print what both servers say of one text: the same in sum, but for the first token."""
    pair = xtok.pair(options.student, options.teacher)
    student, teacher = pair.tokenizers
    ids = student.encode(TEXT).ids.tolist()
    bos = list(teacher.table.roles.get("bos", ())[:1])
    asked = [*bos, *teacher.segment(TEXT)]
    start = time.perf_counter()
    values = own(options.url, ids)
    took = time.perf_counter() - start
    theirs = own(options.teacher_url, asked)
    first = len(teacher.segment(student.table[ids[0]]))  # of the student's first token
    print(
        f"{len(ids)} student tokens, {len(asked)} of the teacher's: {sum(values):.4f} nats after "
        f"the first token, the teacher's own server says {sum(theirs[first:]):.4f} "
        f"({took:.2f} s)"
    )


def own(url: str, ids: list[int]) -> list[float]:
    """Return the log-probability of each token after the first."""
    body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 1}
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(f"{url}/v1/completions", json={"model": model, **body}, timeout=600)
    answer.raise_for_status()
    rows = answer.json()["choices"][0]["prompt_logprobs"]
    return [rows[n][str(i)]["logprob"] for n, i in enumerate(ids) if n]


def train(options: Any) -> list[float]:
    """Train some steps on what the student writes; return the losses."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.server_distillation import (
        ServerDistillationConfig,
        ServerDistillationTrainer,
    )
    from trl.generation import vllm_client

    vllm_client.is_vllm_available = lambda *_: True  # it moves weights, which is not asked for
    tokenizer = AutoTokenizer.from_pretrained(options.student)
    with tempfile.TemporaryDirectory() as folder:
        config = ServerDistillationConfig(
            output_dir=folder, teacher_model_server_url=options.url, beta=0.0, loss_top_k=16,
            max_steps=options.steps, per_device_train_batch_size=4, max_completion_length=32,
            learning_rate=2e-5, logging_steps=1, report_to="none", use_cpu=True, bf16=False,
            disable_tqdm=True, save_strategy="no", lr_scheduler_type="constant", seed=1,
        )  # fmt: skip
        data = Dataset.from_list([{"prompt": text} for text in PROMPTS * options.steps])
        trainer: Any = ServerDistillationTrainer(
            options.student, args=config, train_dataset=data, processing_class=tokenizer
        )
        start = time.perf_counter()
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(f"{len(losses)} steps of 4 x 32 tokens in {time.perf_counter() - start:.0f} s, losses:")
    print(" ".join(f"{loss:.3f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main()
