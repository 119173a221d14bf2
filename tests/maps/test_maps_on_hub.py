"""Maps on the hub as `hf:OWNER/NAME/FILE`; a local server stands in for the hub."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from checks import fails, works
from conftest import Cli

import xtok
from xtok.errors import MapFileError
from xtok.maps.file import sha256
from xtok.tokenizers.hub import is_reachable

NOWHERE = "http://127.0.0.1:9"
COMMIT = "0" * 40


@dataclass
class Repo:
    """The repo `org/maps` at `main` and `v1`: contents of files by name."""

    cache: Path
    monkeypatch: pytest.MonkeyPatch
    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    downloads: Counter[str] = field(default_factory=Counter)

    def use(self, url: str, *, offline: bool = False) -> None:
        """Make this process use the local hub."""
        constants = "huggingface_hub.constants."
        for name, value in {
            "ENDPOINT": url,
            "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": offline,
            "HF_HUB_CACHE": str(self.cache),
        }.items():
            self.monkeypatch.setattr(constants + name, value)
        is_reachable.cache_clear()

    def environment(self, url: str) -> dict[str, str]:
        return {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(self.cache), "HF_HUB_OFFLINE": "0"}

    def answer(self, path: str, *, is_download: bool) -> tuple[int, bytes, dict[str, str]]:
        parts = path.split("?")[0].strip("/").split("/")
        repo, revision, name = "/".join(parts[:2]), parts[3:4], "/".join(parts[4:])
        if parts[0] == "api":
            return 200, b"{}", {}
        if repo == "org/gated":
            return 403, b"", {"X-Error-Code": "GatedRepo"}
        if repo != "org/maps":
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        if revision not in (["main"], ["v1"], [COMMIT]):
            return 404, b"", {"X-Error-Code": "RevisionNotFound"}
        if name not in self.files:
            return 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
        data = self.files[name]
        self.downloads[name] += is_download
        return 200, data, {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT
        }  # fmt: skip


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repo]:
    repo = Repo(tmp_path / "hf", monkeypatch)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, data, headers = repo.answer(self.path, is_download=self.command == "GET")
            self.send_response(code)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    repo.url = f"http://127.0.0.1:{server.server_port}"
    repo.use(repo.url)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    xtok.build("bytes", "bytes").save(tmp_path / "local.safetensors")
    xtok.events("bytes", "bytes").save(tmp_path / "events.safetensors")
    repo.files["map.safetensors"] = (tmp_path / "local.safetensors").read_bytes()
    repo.files["for/event-kl.safetensors"] = (tmp_path / "events.safetensors").read_bytes()
    yield repo
    server.shutdown()
    server.server_close()


MAP = "hf:org/maps/map.safetensors"


def test_the_library_reads_maps_of_the_hub(repo: Repo, tmp_path: Path) -> None:
    local = xtok.ProjectionMap.load(tmp_path / "local.safetensors")
    for source in (
        MAP,
        Path(MAP),
        "hf:org/maps@v1/map.safetensors",
        f"hf:org/maps@{COMMIT}/map.safetensors",
    ):
        assert sha256(xtok.ProjectionMap.load(source)) == sha256(local)
    assert repo.downloads == {"map.safetensors": 1}
    assert xtok.describe(MAP) == xtok.describe(local)
    assert not xtok.verify(MAP).failed
    assert xtok.sort_cut(MAP).nnz == 256
    assert isinstance(xtok.EventMap.load("hf:org/maps/for/event-kl.safetensors"), xtok.EventMap)
    assert xtok.ProjectionModule(MAP).map.nnz == 256


def test_offline_the_cache_serves_the_map(repo: Repo) -> None:
    repo.use(repo.url, offline=True)
    with pytest.raises(MapFileError, match="nor in the local cache"):
        xtok.ProjectionMap.load(MAP)
    repo.use(repo.url)
    first = xtok.ProjectionMap.load(MAP)
    repo.files.clear()
    for url, offline in ((repo.url, True), (NOWHERE, False)):
        repo.use(url, offline=offline)
        assert sha256(xtok.ProjectionMap.load(MAP)) == sha256(first)


@pytest.mark.parametrize(
    ("source", "problem", "hint"),
    [
        ("hf:org/maps/none.safetensors", "no such file", "name and the revision"),
        ("hf:org/maps@v2/map.safetensors", "org/maps at revision v2", "check the spelling"),
        ("hf:org/none/map.safetensors", "org/none", "check the spelling"),
        ("hf:org/gated/map.safetensors", "gated", "hf auth login"),
        ("hf:org/maps", "does not name a file", "hf:OWNER/NAME/FILE"),
    ],
)
def test_errors_of_the_hub_name_the_problem_and_the_fix(
    repo: Repo, cli: Cli, source: str, problem: str, hint: str
) -> None:
    result = cli("inspect", source, env=repo.environment(repo.url))
    assert len(result.stderr.splitlines()) == 2
    fails(result, problem, hint)


def test_an_unreachable_hub_is_an_error_with_a_hint(repo: Repo, cli: Cli) -> None:
    result = cli("inspect", MAP, env=repo.environment(NOWHERE))
    assert len(result.stderr.splitlines()) == 2
    fails(result, "the hub cannot be reached", "hf download org/maps")


def test_commands_read_maps_of_the_hub(repo: Repo, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    env = repo.environment(repo.url)
    for line in (
        f"inspect local.safetensors --against {MAP}", f"sort-cut {MAP} --top-k 2",
        f"evaluate {MAP} hf:org/maps@v1/map.safetensors bytes bytes --text a.txt",
        f"multitoken bytes bytes --initial-projection-path {MAP} -o m.safetensors",
    ):  # fmt: skip
        works(cli(*line.split(), env=env))
    assert not (tmp_path / "hf:org").exists()
    fails(
        cli("build", "bytes", "bytes", "-o", "hf:org/maps/new.safetensors"),
        "on the hub",
        "hf upload",
    )
