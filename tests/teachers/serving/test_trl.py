"""TRL's client and trainer with `xtok serve` and a teacher with a different tokenizer."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from running_servers import running, serving
from served_teachers import TeacherServer
from tiny_models import logged, save_model, weights_of

import xtok
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # TRL 1.16 warns about transformers 5
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed"),
]
ROWS = ["The keeper", "High water: ", "Fog", "Low water is"]


@pytest.fixture(scope="module")
def served(digits: Tokenizer, byte_level: Tokenizer) -> Iterator[tuple[Pair, TeacherServer, str]]:
    """The student's tokens have up to three digits; the teacher's tokens have one."""
    pair, model = xtok.load_pair(byte_level, digits), TeacherServer(digits)
    with running(model.app) as teacher_url, serving(pair, teacher_url) as url:
        yield pair, model, url


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client needs vLLM only to update weights, which is not tested."""
    from trl.generation import vllm_client

    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_: True)
    monkeypatch.setenv("CI", "1")


def test_trls_client_reads_the_log_probabilities(served: tuple[Pair, TeacherServer, str]) -> None:
    from trl.generation.vllm_client import VLLMClient

    pair, _, url = served
    student, _ = pair.tokenizers
    texts = ["In 2014 there were 201 lamps — día tras día.", "Fog 42, and 7"]
    sequences = [student.encode(text).ids.tolist() for text in texts]
    client = VLLMClient(base_url=url, connection_timeout=20)
    assert client.model == pair.student.model_id
    prompts = [5, 1]
    scores = client.get_sequence_logprobs(sequences, prompts, top_logprobs=8, chunk_size=1)
    for n, (ids, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        assert scores["actual_token_ids"][n] == [[i] for i in ids[prompt:]]
        values = torch.tensor(scores["logprobs"][n])
        assert values.shape == (len(ids) - prompt, 8)
        assert torch.isfinite(values).all()
        assert torch.isfinite(torch.tensor(scores["actual_logprobs"][n])).all()
    response = httpx.post(
        f"{url}/v1/completions", json={"prompt": sequences, "prompt_logprobs": 8}, timeout=60
    ).json()
    for n, (ids, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        rows = response["choices"][n]["prompt_logprobs"]
        own = [[rows[m][str(ids[m])]["logprob"]] for m in range(prompt, len(ids))]
        assert scores["actual_logprobs"][n] == own


@pytest.mark.parametrize(("beta", "top_k"), [(1.0, 1), (0.0, 8), (0.5, 1)])
def test_trls_trainer_trains_for_three_steps(
    served: tuple[Pair, TeacherServer, str], small: Path, tmp_path: Path, beta: float, top_k: int
) -> None:
    """After three steps, losses are finite and weights have changed."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.server_distillation import (
        ServerDistillationConfig,
        ServerDistillationTrainer,
    )

    pair, model, url = served
    folder = tmp_path / "student"
    save_model(folder, pair.tokenizers[0], small / "small-byte-level", seed=1, sharp=0.3)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    config = ServerDistillationConfig(
        output_dir=str(tmp_path / "run"), teacher_model_server_url=url, beta=beta,
        loss_top_k=top_k, max_steps=3, per_device_train_batch_size=2, max_completion_length=12,
        learning_rate=0.05, logging_steps=1, report_to="none", use_cpu=True, bf16=False,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": text} for text in ROWS * 2])
    trainer: Any = ServerDistillationTrainer(
        str(folder), args=config, train_dataset=data, processing_class=tokenizer
    )
    before = weights_of(trainer.model)
    model.requested_ids.clear()
    trainer.train()
    losses = logged(trainer)
    assert len(losses) == 3
    assert all(map(math.isfinite, losses))
    after = weights_of(trainer.model)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert len(model.requested_ids) >= 6
