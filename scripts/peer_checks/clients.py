"""Functions of trainers that query a served teacher, tested with `xtok serve` and a small model.

A checkout of slime, miles, xtuner, prime-rl, axolotl or atropos, detected by its files.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import running_servers
import served_teachers
import torch

import xtok
from peer_checks import report
from peer_checks.report import Check, Checks

LEFT_OUT = (
    "Empty modules stand for what their clients import besides aiohttp, httpx, openai and torch. "
    "A small model with Qwen's tokenizer responds like vLLM; the student is Llama 3."
)
PROMPT, RESPONSE = "How many lamps has the keeper?", " In 2014 he lit 201 lamps, día tras día 灯."


class Served(NamedTuple):
    """A server, and a sequence with the expected log-probabilities of the response."""

    url: str
    name: str
    prompt: list[int]
    response: list[int]
    expected: list[float]

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return [*self.prompt, *self.response]


def peer_of(checkout: Path) -> str:
    """Return the project of a checkout."""
    return _client_of(checkout)[1]


def checks(checkout: Path, work: Path) -> Checks:
    """Yield the lines of the client that a checkout has."""
    path, name, check = _client_of(checkout)
    with served(work) as one:
        yield from report.guarded(name, partial(check, checkout, checkout / path, one))


def _client_of(checkout: Path) -> tuple[str, str, Callable[[Path, Path, Served], Checks]]:
    for path, (name, check) in CLIENTS.items():
        if (checkout / path).exists():
            return path, name, check
    raise FileNotFoundError(f"{checkout} has none of {', '.join(CLIENTS)}")


@contextmanager
def served(work: Path) -> Iterator[Served]:
    """Serve a teacher with Qwen's tokenizer to a student with Llama's."""
    _, names = next(iter(report.PAIRS.items()))
    pair = xtok.load_pair(*(report.own_tokenizer(name, work) for name in names))
    student, teacher = pair.tokenizers
    model = served_teachers.TeacherServer(teacher)
    prompt, response = (student.encode(text).ids.tolist() for text in (PROMPT, RESPONSE))
    with running_servers.running(model.app) as url, running_servers.serving(pair, url) as own:
        body = {"prompt": [*prompt, *response], "prompt_logprobs": 0}
        received = httpx.post(f"{own}/v1/completions", json=body, timeout=600).json()
        rows = received["choices"][0]["prompt_logprobs"][len(prompt) :]
        values = [next(iter(row.values()))["logprob"] for row in rows]
        yield Served(own, pair.student.model_id, prompt, response, values)


def agree(what: str, one: Served, found: Sequence[float]) -> Check:
    """Compare a client's result with the log-probabilities."""
    apart = max((abs(a - b) for a, b in zip(found, one.expected, strict=True)), default=math.inf)
    figure = f"{len(found)} tokens, {apart:.0e} apart"
    return Check(what, figure, holds=apart < 1e-5)


class Sample(SimpleNamespace):
    """The fields of slime's and miles's Sample that their clients read."""

    def get_reward_value(self, args: Any) -> Any:
        """Return the reward, as both do without a reward key."""
        return self.reward


def _opd(checkout: Path, path: Path, one: Served) -> Checks:
    """slime's, and miles's: `reward_func`, then `post_process_rewards`."""
    package = path.relative_to(checkout).parts[0]
    _packages(checkout, package, f"{package}.rollout", f"{package}.utils")
    report.stand_in(f"{package}.utils.processing_utils", encode_image_for_rollout_engine=None)
    report.stand_in(f"{package}.utils.types", Sample=Sample)
    module = importlib.import_module(f"{package}.rollout.on_policy_distillation")

    def scored(**more: Any) -> Any:
        args = SimpleNamespace(rm_url=f"{one.url}/generate", rollout_temperature=1.0, **more)
        sample = Sample(
            tokens=one.ids, response_length=len(one.response), multimodal_inputs=None, metadata={}
        )
        return args, sample

    args, sample = scored()
    sample.reward = asyncio.run(module.reward_func(args, sample))
    module.post_process_rewards(args, [sample])
    yield agree("`post_process_rewards`", one, sample.teacher_log_probs.tolist())
    if package != "miles":
        return
    for strategy in (
        "only-student",
        "intersection",
    ):  # other clients also query the student's own server
        args, sample = scored(
            opd_log_prob_top_k=4, opd_top_k_strategy=strategy, opd_reward_weight_mode="student_p"
        )
        top = [[[-1.0 - n, i, None] for n, i in enumerate((own, 5, 6, 7))] for own in one.response]
        sample.metadata["opd_student_top_logprobs"] = top
        sample.reward = asyncio.run(module.reward_func(args, sample))
        module.post_process_rewards(args, [sample])
        values = sample.opd_reverse_kl
        what = f"`--opd-log-prob-top-k 4`, {strategy}"
        is_finite = bool(torch.isfinite(values).all())
        holds = is_finite and len(values) == len(one.response)
        yield Check(what, f"{len(values)} finite values", holds)


def _xtuner(checkout: Path, path: Path, one: Served) -> Checks:
    """The strictest reader: equal ids, finite values, exact numbers of rows."""
    names = ("xtuner", "xtuner.v1", "xtuner.v1.rl", "xtuner.v1.rl.distillation")
    _packages(checkout, *names, "xtuner.v1.data_proto")
    status = SimpleNamespace(FAILED="failed")
    contents = {"RolloutState": None, "SampleParams": None, "Status": status}
    report.stand_in("xtuner.v1.data_proto.rl_data", **contents)
    logger = SimpleNamespace(warning=print)
    report.stand_in("xtuner.v1.utils", get_logger=lambda: logger)
    report.stand_in("xtuner.v1.rl.distillation.config", RolloutTeacherConfig=None)
    module = importlib.import_module("xtuner.v1.rl.distillation.rollout_teacher_client")
    module.os.environ["XTUNER_USE_SGLANG"] = "1"
    for is_cached in (False, True):
        config = SimpleNamespace(
            name="teacher", endpoints=[one.url], max_concurrency=4, api_key="key",
            request_timeout_s=600.0, enable_prefix_caching=is_cached, max_retry_per_sample=0,
        )  # fmt: skip
        state = SimpleNamespace(
            prompt_ids=one.prompt, response_ids=one.response, extra_fields={}, group_id=0,
            status="", error_msg="", teacher_logprobs=[],
        )  # fmt: skip
        client = module.RolloutTeacherClient(config)
        found = asyncio.run(client.compute_logprobs(state))
        if found.status == "failed":
            raise RuntimeError(found.error_msg)
        what = f"`compute_logprobs`, prefix caching {'on' if is_cached else 'off'}"
        yield agree(what, one, found.teacher_logprobs)


def _prime_rl(checkout: Path, path: Path, one: Served) -> Checks:
    from openai import AsyncOpenAI

    names = ["vllm", "vllm.entrypoints", "vllm.entrypoints.scale_out"]
    for name in (*names, "vllm.entrypoints.scale_out.token_in_token_out"):
        report.stand_in(name, __path__=[])
    protocol = "vllm.entrypoints.scale_out.token_in_token_out.protocol"
    report.stand_in(protocol, GenerateResponse=SimpleNamespace(model_validate_json=_response))
    prefill = _function(path, "prefill_logprobs", httpx=sys.modules["httpx2"], AsyncOpenAI=None)

    async def ask() -> list[float]:
        async with AsyncOpenAI(base_url=f"{one.url}/v1", api_key="key") as client:
            listed = [model.id async for model in client.models.list()]
            assert one.name in listed
            values: list[float] = await prefill(client, one.name, one.ids)
            return values

    values = asyncio.run(ask())
    yield agree("`prefill_logprobs`", one, values[len(one.prompt) :])


def _response(content: bytes) -> Any:
    """The required fields of vLLM's GenerateResponse, with their types."""
    value = json.loads(content)
    assert isinstance(value["request_id"], str)
    for choice in value["choices"]:
        assert isinstance(choice["index"], int)
        assert isinstance(choice["token_ids"], list)
        assert isinstance(choice["finish_reason"], str)
    return SimpleNamespace(prompt_logprobs=value["prompt_logprobs"])


def _axolotl(checkout: Path, path: Path, one: Served) -> Checks:
    source = checkout / "src"
    _packages(source, "axolotl", "axolotl.integrations", "axolotl.integrations.kd")
    _packages(source, "axolotl.utils", "axolotl.utils.data")
    collator = "axolotl.integrations.kd.collator"
    base = type("KDBatchSamplerDataCollatorForSeq2Seq", (), {})
    report.stand_in(collator, KDBatchSamplerDataCollatorForSeq2Seq=base)

    def retry_on_request_exceptions(**_: Any) -> Callable[[Any], Any]:
        return lambda function: function

    report.stand_in(
        "axolotl.utils.data.utils", retry_on_request_exceptions=retry_on_request_exceptions
    )
    report.stand_in(
        "axolotl.utils.logging", get_logger=lambda _: SimpleNamespace(error=print, warning=print)
    )
    module = importlib.import_module("axolotl.integrations.kd.collator_online_teacher")
    labels = [*[-100] * len(one.prompt), *one.response]
    for kind in ("vllm", "sglang"):
        made = module.OnlineTeacherCollator(
            kd_online_server_base_url=one.url, kd_online_topk=8, kd_online_server=kind,
            kd_normalize_topk=False,
        )  # fmt: skip
        fetch = getattr(made, f"fetch_online_logprobs_{kind}")
        found = fetch([one.ids, one.ids[:-2]], [labels, labels[:-2]])
        values = torch.tensor(found["target_logprobs"][0])
        ids = torch.tensor(found["target_token_ids"][0])
        count = len(one.ids)
        # Its vLLM reader drops the first row, so row i belongs to token i + 1.
        rows = slice(len(one.prompt) - (kind == "vllm"), count - (kind == "vllm"))
        kept, own = ids[rows], torch.tensor(one.response)[:, None]
        is_right = values.shape == (count, 8) and bool(torch.isfinite(values[rows]).all())
        listed = (kept == own).any(-1)
        if kind == "vllm":
            is_right &= bool((kept[:, 0] == own[:, 0]).all())
            yield agree(
                f"`fetch_online_logprobs_{kind}`, the text's own tokens",
                one,
                values[rows][:, 0].tolist(),
            )
        figure = f"{count} rows of 8; the text's own token in {float(listed.float().mean()):.0%}"
        yield Check(f"`fetch_online_logprobs_{kind}`, rows", figure, holds=is_right)


def _atropos(checkout: Path, path: Path, one: Served) -> Checks:
    import aiohttp

    typing = {"Any": Any, "Dict": dict, "List": list, "Tuple": tuple}
    functions = {
        name: _function(path, name, aiohttp=aiohttp, **typing)
        for name in ("_get_logprobs_wrapper", "_normalize_topk_entry")
    }
    config = SimpleNamespace(base_url=f"{one.url}/v1", api_key="key", timeout=600)
    normalize = functions["_normalize_topk_entry"]
    server = SimpleNamespace(config=config, _normalize_topk_entry=normalize)
    found = asyncio.run(functions["_get_logprobs_wrapper"](server, input_ids=one.ids, top_k=4))
    rows = list(zip(found["prompt_topk_token_ids"], found["prompt_topk_logprobs"], strict=True))
    values = [dict(zip(*row, strict=True)) for row in rows]
    own = [row[i] for i, row in zip(one.ids[1:], values[1:], strict=True)]
    yield agree("`_get_logprobs_wrapper`", one, own[len(one.prompt) - 1 :])


def _packages(folder: Path, *names: str) -> None:
    for name in names:
        report.stand_in(name, __path__=[str(folder / name.replace(".", "/"))])


def _function(path: Path, name: str, **contents: Any) -> Any:
    """Return one function of a file, without the imports of the whole."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    [found] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    found.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, found], []), str(path), "exec"), contents)
    return contents[name]


CLIENTS: dict[str, tuple[str, Callable[[Path, Path, Served], Checks]]] = {
    "slime/rollout/on_policy_distillation.py": ("slime", _opd),
    "miles/rollout/on_policy_distillation.py": ("miles", _opd),
    "xtuner/v1/rl/distillation/rollout_teacher_client.py": ("xtuner", _xtuner),
    "src/prime_rl/utils/client.py": ("prime-rl", _prime_rl),
    "src/axolotl/integrations/kd/collator_online_teacher.py": ("axolotl, online", _axolotl),
    "atroposlib/envs/server_handling/vllm_server.py": ("atropos", _atropos),
}
