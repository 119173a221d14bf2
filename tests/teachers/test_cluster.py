"""Run `xtok project` on a cluster of node processes and kill one; requires the package ray."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest
import stored_teachers as teachers
from chat_families import CHAT
from conftest import Cli
from stored_teachers import Row

import xtok
from xtok.config import ProjectConfig
from xtok.errors import XtokError
from xtok.teachers import cluster, parts
from xtok.teachers.cluster import Cluster
from xtok.tokenizers.pairs import Pair

pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of three node processes on this machine, with one core each."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    options = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    ray_cluster = Cluster(initialize_head=True, head_node_args=options)
    try:
        for _ in range(2):
            ray_cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        ray.init(address=ray_cluster.address, log_to_driver=False, logging_level="error")
        yield ray_cluster
    finally:
        ray.shutdown()
        ray_cluster.shutdown()


@pytest.fixture
def local_cluster(models: list[str]) -> Cluster:
    """The cluster of this process, and the tokenizers for its nodes."""
    student, teacher = models
    return Cluster(student=student, teacher=teacher)


def same_bytes(folder: Path, first: str, second: str) -> bool:
    return (folder / first).read_bytes() == (folder / second).read_bytes()


@pytest.mark.usefixtures("nodes")
def test_each_job_has_its_own_projector(
    cache_file: Path, back: Pair, back_map: Path, local_cluster: Cluster, tmp_path: Path
) -> None:
    """Several jobs write one output, one after another, on the same worker processes."""
    for top_k in (8, 2):
        config = ProjectConfig(top_k=top_k)
        run = partial(xtok.project, cache_file, back, config=config, back_map=back_map)
        run(tmp_path / "remote.parquet", cluster=local_cluster)
        run(tmp_path / "local.parquet")
        assert same_bytes(tmp_path, "local.parquet", "remote.parquet")


@pytest.mark.usefixtures("nodes")
def test_nodes_use_the_templates_of_this_folder(
    back: Pair, back_map: Path, local_cluster: Cluster, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The folder of the nodes does not contain the template."""
    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    ids = xtok.render(back.tokenizers[1], CHAT, template="t.jinja").ids.tolist()
    size = back.teacher.vocab_size
    row = {"messages": json.dumps(CHAT), **teachers.predicted(ids, size, 8)}
    path = teachers.write_neutral(tmp_path / "a.parquet", [row])
    config = ProjectConfig(student_template="plain", teacher_template="t.jinja")
    run = partial(xtok.project, path, back, config=config, back_map=back_map)
    run(tmp_path / "remote.parquet", cluster=local_cluster)
    run(tmp_path / "local.parquet")
    assert same_bytes(tmp_path, "local.parquet", "remote.parquet")


def test_the_command_projects_on_a_cluster(
    nodes: Any, cli: Cli, models: list[str], cache_file: Path, back_map: Path, tmp_path: Path
) -> None:
    command = "project", cache_file.name, *models, "--map", back_map
    remote = cli(
        *command, "-o", "remote.parquet", "--engine", "ray", "--address", nodes.address,
        # runs as a separate process, because Ray does not work in forks
        env={"PYTHONFAULTHANDLER": "1"},
    )  # fmt: skip
    assert (remote.returncode, remote.stdout) == (0, "remote.parquet\n"), remote.stderr
    here = cli(*command, "-o", "local.parquet")
    assert here.stderr.splitlines()[-2:] == remote.stderr.splitlines()[-2:]
    assert same_bytes(tmp_path, "local.parquet", "remote.parquet")
    assert len([*tmp_path.iterdir()]) == 3


@pytest.mark.usefixtures("nodes")
def test_an_error_of_the_user_keeps_its_message_on_a_cluster(
    stored: list[Row], back: Pair, back_map: Path, local_cluster: Cluster, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    bad = [*stored[:5], {**stored[5], "text": "some other text"}]
    path = teachers.write_neutral(tmp_path / "a.parquet", bad)
    run = partial(xtok.project, path, back, tmp_path / "out.parquet", back_map=back_map)
    with pytest.raises(XtokError, match=f"^{path}, row 5: "):
        run(cluster=local_cluster)
    with pytest.raises(XtokError, match="different tokenizer"):
        run(cluster=replace(local_cluster, teacher=local_cluster.student))
    monkeypatch.setattr(Path, "absolute", lambda path: path.with_name("elsewhere.parquet"))
    with pytest.raises(XtokError, match=r"elsewhere\.parquet"):
        run(cluster=local_cluster)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("__version__", "0.0.9", "has xtok .*0.0.9"),
        ("library_versions", lambda: {"tokenizers": "0.0.1"}, "has tokenizers .*0.0.1"),
        ("library_versions", lambda: {"not-there": "1"}, ".*not-there"),
    ],
)
@pytest.mark.usefixtures("nodes")
def test_nodes_have_the_same_packages(
    name: str, value: object, problem: str, cache_file: Path, back: Pair, back_map: Path,
    local_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(parts, name, value)
    with pytest.raises(XtokError, match=f"{socket.gethostname()} {problem}"):
        xtok.project(
            cache_file, back, tmp_path / "out.parquet", back_map=back_map, cluster=local_cluster
        )
    assert [*tmp_path.iterdir()] == [cache_file]


def test_a_failure_of_a_nodes_system_is_raised_without_rays_traceback() -> None:
    class TaskError(Exception):
        cause = OSError(28, "No space left on device", "a.part")

    def get(reference: object) -> None:
        raise TaskError("Traceback of a node")

    ray = SimpleNamespace(get=get, exceptions=SimpleNamespace(RayTaskError=TaskError))
    with pytest.raises(OSError, match=r"a\.part"):
        cluster.fetch_result(ray, None)


def test_a_node_without_xtok() -> None:
    """A node's function is pickled by value, so a missing xtok gives a message, not a traceback."""
    from ray import cloudpickle

    code = (
        "import sys; sys.modules['xtok'] = None; from ray import cloudpickle; "
        "print(cloudpickle.loads(sys.stdin.buffer.read())([], 0))"
    )
    task = cloudpickle.dumps(cluster.task_for("0.1.0", {}))
    result = subprocess.run([sys.executable, "-c", code], input=task, stdout=subprocess.PIPE)
    assert result.stdout.decode() == (
        f"the node {socket.gethostname()} does not have the package xtok\n"
    )


def test_the_output_is_the_same_after_the_loss_of_a_node(
    nodes: Any, stored: list[Row], back: Pair, back_map: Path, local_cluster: Cluster,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A node is killed while two files with many row groups are projected.

    This is the last test of the cluster, as later commands might connect through the killed node.
    """
    teachers.write_neutral(tmp_path / "a.parquet", stored * 8)
    teachers.write_lines(tmp_path / "b.jsonl", [teachers.vllm_response(row) for row in stored])
    paths = [tmp_path / "a.parquet", tmp_path / "b.jsonl"]
    run = partial(xtok.project, paths, back, back_map=back_map)
    lost, steps = nodes.list_all_nodes()[-1], list[int]()

    @contextmanager
    def killing(label: str, total: int) -> Iterator[Callable[[int, int], object]]:
        def advance(size: int, tokens: int) -> None:
            steps.append(tokens)
            if len(steps) == 6:
                nodes.remove_node(lost, allow_graceful=False)  # SIGKILL to all its processes

        yield advance

    remote = run(tmp_path / "remote.parquet", cluster=local_cluster, progress=killing)
    local = run(tmp_path / "local.parquet")
    assert len(nodes.list_all_nodes()) == 2
    assert len(steps) == 25
    assert 0 < sum(steps) <= local.student_tokens  # a finished part may be lost with its node
    assert (remote.targets, remote.mean_rest) == (local.targets, local.mean_rest)
    assert same_bytes(tmp_path, "local.parquet", "remote.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "remote.parquet")
    assert table["id"].to_pylist() == [row["id"] for row in stored * 9]


def test_no_server_at_the_address() -> None:
    """Without xtok's check, Ray would try to connect for minutes."""

    class Ray:
        @staticmethod
        def init(**options: object) -> None:
            raise AssertionError

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # not listening
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(XtokError, match=f"Ray cluster at {address}: "):
            cluster.connect(Ray, address)


def test_an_error_without_a_message_is_named_by_its_class() -> None:
    class Ray:
        @staticmethod
        def init(**options: object) -> None:
            raise ConnectionError

    with pytest.raises(XtokError, match="ConnectionError"):
        cluster.connect(Ray, "here")
