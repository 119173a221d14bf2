"""Text counted on a cluster of node processes, one of which is killed; needs the package ray."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_tokenizers
from conftest import Cli

from xtok.config import MultitokenConfig
from xtok.counting import ray as cluster
from xtok.counting import texts
from xtok.counting.pair_text import PairText, Wanted
from xtok.counting.ray import TokenizerSource, read_on_ray
from xtok.errors import XtokError
from xtok.stages.multitoken import multitoken
from xtok.vocab.pair import Pair

pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of three node processes on this machine, one core each."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    options = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=options)
    try:
        for _ in range(2):
            found.add_node(num_cpus=1, object_store_memory=80 << 20)
        ray.init(address=found.address, log_to_driver=False, logging_level="error")
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of many shards."""
    lines = [line for text in small_tokenizers.CORPUS for line in text.splitlines() if line]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines * 4))
    monkeypatch.setattr(texts, "SHARD_BYTES", path.stat().st_size // 40)
    return path


def sources(small: Path) -> list[TokenizerSource]:
    return [
        TokenizerSource(model=str(small / f"small-{name}")) for name in ("byte-level", "digits")
    ]


def test_a_lost_node_changes_nothing(nodes: Any, pair: Pair, small: Path, corpus: Path) -> None:
    wanted = Wanted(target="both", hold_out=True)
    lost = nodes.list_all_nodes()[-1]
    steps: list[int] = []

    @contextmanager
    def killing(label: str, total: int) -> Iterator[Callable[[int, int], object]]:
        def advance(size: int, tokens: int) -> None:
            steps.append(tokens)
            if len(steps) == 6:
                nodes.remove_node(lost, allow_graceful=False)  # SIGKILL to all its processes

        yield advance

    found = read_on_ray(pair, corpus, wanted, sources=sources(small), progress=killing)
    local = PairText.read(pair, corpus, wanted)
    assert len(steps) == len(texts.Texts(corpus).shards)
    assert len(steps) > cluster.FAN_IN  # so that they are merged in more than one step
    assert len(nodes.list_all_nodes()) == 2
    for part in ("counted", "held"):
        arrays = zip(getattr(found, part).pairs(), getattr(local, part).pairs(), strict=True)
        assert all(np.array_equal(a, b) for a, b in arrays)
    assert (found.totals, found.sources) == (local.totals, local.sources)
    assert all(np.array_equal(*arrays) for arrays in zip(found.tokens, local.tokens, strict=True))
    assert sum(steps) == local.totals.student_tokens


def test_a_users_mistake_comes_back_as_one(
    nodes: Any, pair: Pair, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9")
    student, teacher = sources(small)
    with pytest.raises(XtokError) as error:
        read_on_ray(pair, path, sources=[student, teacher])
    assert error.value.message == f"the text {path} is not UTF-8: byte 0xe9 at offset 3, in line 1"
    with pytest.raises(XtokError) as error:
        read_on_ray(pair, path, sources=[student, student])
    assert error.value.message.startswith(f"{student.model} is another tokenizer on the node ")
    path.write_text("the text\n")
    monkeypatch.setattr(Path, "absolute", lambda path: path.with_name("elsewhere.txt"))
    with pytest.raises(XtokError) as error:
        read_on_ray(pair, path, sources=[student, teacher])
    assert error.value.message.endswith(f" has no file {path.with_name('elsewhere.txt')}")


def test_the_command_counts_on_a_cluster(
    nodes: Any, cli: Cli, pair: Pair, small: Path, corpus: Path, tmp_path: Path
) -> None:
    multitoken(pair, config=MultitokenConfig(scale_trick=False)).save(tmp_path / "base.safetensors")
    arguments = (
        "build", "--student-model", small / "small-byte-level", "--teacher-model",
        small / "small-digits", "--text", corpus, "--initial-projection-path", "base.safetensors",
        "--target", "chunk",
    )  # fmt: skip
    here = cli(*arguments, "--output", "local.safetensors")
    assert here.returncode == 0, here.stderr
    there = cli(
        *arguments, "--output", "ray.safetensors", "--engine", "ray", "--address", nodes.address
    )
    assert (there.returncode, there.stdout) == (0, "ray.safetensors\n"), there.stderr
    written = [(tmp_path / name).read_bytes() for name in ("local.safetensors", "ray.safetensors")]
    assert written[0] == written[1]


def test_an_error_without_words_is_named() -> None:
    class Ray:
        @staticmethod
        def init(**options: object) -> None:
            raise ConnectionError

    with pytest.raises(XtokError, match=r"^there is no Ray cluster at here: ConnectionError"):
        cluster._connect(Ray, "here")


def test_no_cluster_is_one_line(cli: Cli, small: Path, corpus: Path) -> None:
    done = cli(
        "build", "--student-model", small / "small-byte-level", "--teacher-model",
        small / "small-digits", "--text", corpus, "--engine", "ray", "--address", "nowhere",
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: there is no Ray cluster at nowhere: " in done.stderr
    assert "Traceback" not in done.stderr
