"""On-policy distillation in slime, from a teacher with another tokenizer: its two hooks.

    export STUDENT_TOKENIZER=Qwen/Qwen3-8B TEACHER_TOKENIZER=meta-llama/Llama-3.3-70B-Instruct
    python -m sglang.launch_server --model-path $TEACHER_TOKENIZER --port 13141   # the teacher
    python train.py … --use-opd --opd-type sglang --opd-kl-coef 1.0 \
        --rm-url http://teacher:13141/generate \
        --custom-rm-path slime_hooks.reward_func \
        --custom-reward-post-process-path slime_hooks.post_process_rewards

slime's own hooks (slime/rollout/on_policy_distillation.py, version 0.3.1) send the student's ids,
so that the teacher must have the student's tokenizer. These send the same bytes in the teacher's
tokens, and put its log-probabilities on the student's tokens. Tokens without one are left out of
the loss by `loss_mask`. Put this file where slime can import it (PYTHONPATH).
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

import xtok
from xtok.errors import XtokError

REQUESTS = ThreadPoolExecutor(128)
"""So many samples may wait for the teacher at once."""


class Pair(NamedTuple):
    """Both tokenizers, loaded once per process."""

    aligner: xtok.TokenAligner
    retokenizer: xtok.Retokenizer


@functools.cache
def pair() -> Pair:
    """Load the tokenizers that the environment names."""
    names = [os.environ.get(name) for name in ("STUDENT_TOKENIZER", "TEACHER_TOKENIZER")]
    if not all(names):
        raise XtokError(
            "STUDENT_TOKENIZER or TEACHER_TOKENIZER is not set",
            hint="export both in the environment of slime's rollout workers: repo ids or folders",
        )
    both = xtok.pair(*map(str, names))
    return Pair(xtok.TokenAligner(both), xtok.Retokenizer(both))


def teacher_ids(tokens: Sequence[int], response_length: int) -> list[int]:
    """Return a sample in the teacher's tokens; none reaches from the prompt into the response."""
    start = len(tokens) - response_length
    return pair().retokenizer.sequence(tokens[:start], tokens[start:])


async def reward_func(args: Any, sample: Any, **kwargs: Any) -> Any:
    """Have the teacher score a sample: `--custom-rm-path`."""
    payload = {
        "input_ids": teacher_ids(sample.tokens, sample.response_length),
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    request = urllib.request.Request(
        args.rm_url, json.dumps(payload).encode(), {"Content-Type": "application/json"}
    )
    return await asyncio.get_running_loop().run_in_executor(REQUESTS, ask, request)


def ask(request: urllib.request.Request) -> Any:
    """Return the answer to a request; a busy teacher may answer late."""
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def post_process_rewards(
    args: Any, samples: Sequence[Any], **kwargs: Any
) -> tuple[list[float], list[float]]:
    """Set each sample's `teacher_log_probs`: `--custom-reward-post-process-path`.

    The rewards are 0: the signal is the KL penalty. Add a task's rewards here if you have some.
    """
    for sample in samples:
        scored = sample.get_reward_value(args)["meta_info"]["input_token_logprobs"]
        count, ids = sample.response_length, [entry[1] for entry in scored]
        if ids != teacher_ids(sample.tokens, count):
            raise XtokError(
                "the teacher scored other ids than it was sent",
                hint="set TEACHER_TOKENIZER to the tokenizer of the model at --rm-url",
            )
        is_response = [n >= len(sample.tokens) - count for n in range(len(sample.tokens))]
        projected = xtok.project_logprobs(
            pair().aligner,
            sample.tokens,
            ids,
            [entry[0] for entry in scored],
            response_mask=is_response,
        )
        start = len(sample.tokens) - count
        sample.teacher_log_probs = torch.from_numpy(projected.logprobs[start:])
        mask = sample.loss_mask or [1] * count
        sample.loss_mask = [
            int(m and v) for m, v in zip(mask, projected.valid[start:], strict=True)
        ]
    rewards = [0.0] * len(samples)
    return rewards, rewards
