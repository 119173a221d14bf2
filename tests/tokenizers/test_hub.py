"""Loading from a hub on loopback, which counts the requests."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from checks import fails, not_loaded, works
from command_lines import run_python
from conftest import Cli
from make_tokenizers import copy_folder

from xtok.errors import TokenizerError
from xtok.maps.projection_map import ProjectionMap
from xtok.tokenizers import load_tokenizer
from xtok.tokenizers.checkpoint import Checkpoint
from xtok.tokenizers.hub import ModelFiles, is_reachable

OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"
NOWHERE = "http://127.0.0.1:9"


@dataclass
class Hub:
    """Repos by name; each maps revisions to commits, and commits to files."""

    monkeypatch: pytest.MonkeyPatch
    cache: Path
    url: str = ""
    repos: dict[str, dict[str, Path]] = field(default_factory=dict)
    downloads: Counter[str] = field(default_factory=Counter)
    gated: tuple[str, ...] = ()
    token: str | None = None
    delay: float = 0.0
    hangs_up: bool = False

    def add(self, repo: str, *folders: Path) -> None:
        commits = dict(zip((OLD, NEW), folders, strict=False))
        self.repos[repo] = {**commits, "main": folders[-1], "v1": folders[0]}

    def commit(self, repo: str, revision: str) -> str:
        folder = self.repos[repo][revision]
        return OLD if self.repos[repo][OLD] == folder else NEW

    def ask(self, url: str) -> None:
        """Make this process use the hub at a URL."""
        constants = "huggingface_hub.constants."
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in (
            (f"{constants}ENDPOINT", url), (f"{constants}HUGGINGFACE_CO_URL_TEMPLATE", template),
            (f"{constants}HF_HUB_OFFLINE", False), (f"{constants}HF_HUB_CACHE", str(self.cache)),
            ("huggingface_hub.hf_api.api.endpoint", url),
        ):  # fmt: skip
            self.monkeypatch.setattr(name, value)
        if "transformers" in sys.modules:  # it keeps the URL of its first request
            self.monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
        is_reachable.cache_clear()

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a process that uses this hub."""
        plain = {"HF_ENDPOINT": self.url, "HF_HOME": str(self.cache), "HF_HUB_OFFLINE": "0"}
        known = {k: v for k, v in os.environ.items() if k not in ("HF_TOKEN", "HF_HUB_CACHE")}
        return {**known, **plain, "HF_HUB_DISABLE_TELEMETRY": "1", **more}


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:  # noqa: C901 - a protocol's cases
    """Implement a part of the hub's HTTP API: `resolve`, and two listings of `api`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[0] == "api":
                return self.answer(200, json.dumps(self.listed(parts)).encode())
            repo, revision, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
            if repo in hub.gated:
                return self.answer(403, b"", **{"X-Error-Code": "GatedRepo"})
            if repo not in hub.repos:
                return self.answer(404, b"", **{"X-Error-Code": "RepoNotFound"})
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.answer(401, b"", **{"X-Error-Code": "RepoNotFound"})
            if revision not in hub.repos[repo]:
                return self.answer(404, b"", **{"X-Error-Code": "RevisionNotFound"})
            commit = hub.commit(repo, revision)
            path = hub.repos[repo][revision] / name
            if not path.is_file():
                code = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
                return self.answer(404, b"", **code)
            data = path.read_bytes()
            if self.command == "GET" and hub.hangs_up:
                self.close_connection = True
                return None
            if self.command == "GET":
                hub.downloads[name] += 1
                time.sleep(hub.delay)
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            return self.answer(200, data, **{"ETag": etag, "X-Repo-Commit": commit})

        do_HEAD = do_GET

        def listed(self, parts: list[str]) -> object:
            """The files of a folder, for api/models/ORG/NAME/tree/REVISION/FOLDER."""
            if parts[4:5] != ["tree"]:
                return {}
            folder = hub.repos["/".join(parts[2:4])][parts[5]] / "/".join(parts[6:])
            names = [path.relative_to(folder.parent) for path in sorted(folder.glob("*"))]
            return [{"type": "file", "path": str(name), "size": 1, "oid": "1"} for name in names]

        def do_POST(self) -> None:
            parts = self.path.strip("/").split("/")
            form = self.rfile.read(int(self.headers["Content-Length"])).decode()
            [name] = urllib.parse.parse_qs(form)["paths"]
            path = hub.repos["/".join(parts[2:4])][parts[5]] / name
            kind = "directory" if path.is_dir() else "file"
            listing = {"type": kind, "path": name, "size": 1, "oid": "1"}
            return self.answer(200, json.dumps([listing] * path.exists()).encode())

        def answer(self, code: int, data: bytes, **headers: str) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


class Server(ThreadingHTTPServer):
    request_queue_size = 64


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process asks, with an empty cache."""
    hub = Hub(monkeypatch=monkeypatch, cache=tmp_path / "hf")
    server = Server(("127.0.0.1", 0), handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    hub.ask(hub.url)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def cached(small: Path, tmp_path: Path) -> Path:
    """The snapshot of `org/model` in the local cache."""
    repo = tmp_path / "hf" / "models--org--model"
    shutil.copytree(small / "small-byte-level", repo / "snapshots" / NEW)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(NEW)
    return repo / "snapshots" / NEW


# Sixteen processes start at once, forked after the slow imports.
LOAD_AT_ONCE = """
import multiprocessing, sys
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from xtok.tokenizers import load_tokenizer

def load(barrier, results):
    barrier.wait()
    tokenizer = load_tokenizer(sys.argv[1])
    results.put((tokenizer.table.sha256(), tokenizer.vocabulary.backend,
                 tokenizer.vocabulary.vocab_size, tokenizer.segment(b" the text")))

context = multiprocessing.get_context("fork")
barrier, results = context.Barrier(16), context.Queue()
processes = [context.Process(target=load, args=(barrier, results)) for _ in range(16)]
for process in processes:
    process.start()
loaded = [results.get(timeout=200) for _ in processes]
for process in processes:
    process.join()
assert not any(process.exitcode for process in processes)
for values in loaded:
    print(*values)
"""


def test_sixteen_processes_load_a_repo_for_the_first_time(hub: Hub, small: Path) -> None:
    hub.add("org/model", small / "small-byte-level")
    hub.delay = 0.2  # all processes are ready before the first download ends
    result = run_python(LOAD_AT_ONCE, "org/model", env=hub.environment(), timeout=300)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 16
    assert len(set(lines)) == 1
    assert hub.downloads["tokenizer.json"] == 1
    assert max(hub.downloads.values()) == 1


def test_a_pinned_revision(hub: Hub, small: Path) -> None:
    hub.add("org/model", small / "small-byte-level", small / "small-digits")
    loaded = {}
    for revision in ("", "@main", "@v1", f"@{OLD}", f"@{NEW}"):
        tokenizer = load_tokenizer(f"org/model{revision}")
        loaded[revision] = tokenizer.vocabulary.revision, tokenizer.table.sha256()
    assert loaded[""] == loaded["@main"] == loaded[f"@{NEW}"]
    assert loaded["@v1"] == loaded[f"@{OLD}"]
    assert [loaded[name][0] for name in ("", "@v1")] == [NEW, OLD]
    assert loaded[""][1] != loaded["@v1"][1]


def test_a_repo_of_a_sentencepiece_file(hub: Hub, small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "spm"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes((small / "small.model").read_bytes())
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 1024}')
    hub.add("org/spm", folder)
    assert repr(load_tokenizer("org/spm")) == "Tokenizer('org/spm', hf, 1024 ids)"
    assert dict(hub.downloads) == {"tokenizer.model": 1, "config.json": 1}


def test_a_revision_is_no_split_pattern(hub: Hub, small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / "tiktoken.model").write_bytes((small / "small.tiktoken").read_bytes())
    hub.add("org/model", folder)
    for name in ("org/model", "org/model@main", f"org/model@{OLD}"):
        with pytest.raises(TokenizerError, match="unknown family"):
            load_tokenizer(name)


def test_chat_templates_in_a_folder_of_a_repo(hub: Hub, small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small / "small-digits", folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    hub.add("org/model", small / "small-digits", folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    assert sorted(load_tokenizer("org/model").chat_templates) == ["default", "rag"]
    assert not load_tokenizer("org/model@v1").chat_templates


def test_a_branch_that_moves_does_not_mix_two_commits(hub: Hub, small: Path) -> None:
    hub.add("org/model", small / "small-byte-level", small / "small-digits")
    hub.repos["org/model"]["main"] = small / "small-byte-level"
    files = ModelFiles("org/model")
    paths = [files.find("tokenizer.json")]
    hub.repos["org/model"]["main"] = small / "small-digits"
    paths.append(files.find("config.json"))
    assert [path and path.parent.name for path in paths] == [OLD, OLD]


def test_offline_mode_reads_the_cache_without_requests(hub: Hub, small: Path) -> None:
    hub.add("org/model", small / "small-byte-level")
    with pytest.raises(TokenizerError, match="nor in the local cache"):
        load_tokenizer("org/model", offline=True)
    assert not hub.downloads
    load_tokenizer("org/model")
    assert hub.downloads["tokenizer.json"] == 1
    hub.repos.clear()  # after this, the hub has no repos
    assert load_tokenizer("org/model", offline=True).vocabulary.revision == OLD


@pytest.mark.usefixtures("cached")
def test_the_commit_of_a_repo_is_recorded(tmp_path: Path, cli: Cli) -> None:
    env = {"HF_HUB_CACHE": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    result = works(cli("build", "org/model@main", "bytes", env=env))
    projection = ProjectionMap.load(tmp_path / result.stdout.strip())
    assert projection.student.revision == NEW
    assert projection.teacher.revision is None


def test_an_unreachable_hub_is_an_error_within_seconds(tmp_path: Path, cli: Cli) -> None:
    env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": NOWHERE, "HF_HOME": str(tmp_path / "hf")}
    start = time.monotonic()
    result = cli("doctor", "models/llama", env=env)
    assert time.monotonic() - start < 15  # the hub's own library: 23 seconds
    assert len(result.stderr.splitlines()) == 2
    fails(result, "the hub cannot be reached", "hf download models/llama ")


def test_files_missing_from_the_cache_are_noted_if_the_hub_is_unreachable(
    cached: Path, hub: Hub
) -> None:
    (cached / "generation_config.json").unlink()  # it defines ids that end a text
    hub.ask(NOWHERE)
    tokenizer = load_tokenizer("org/model")
    [note] = [note for note in tokenizer.notes if "generation_config.json" in note]
    assert note.startswith("the hub cannot be reached")
    offline = load_tokenizer("org/model", offline=True)
    assert offline.vocabulary.revision == tokenizer.vocabulary.revision == NEW
    assert not offline.notes
    (cached / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="cannot be reached"):
        load_tokenizer("org/model")


def test_a_cached_sentencepiece_repo_without_the_hub(cached: Path, small: Path, hub: Hub) -> None:
    shutil.copy(small / "small.model", cached / "tokenizer.model")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (cached / name).unlink()
    hub.ask(NOWHERE)
    for offline in (False, True):
        assert load_tokenizer("org/model", offline=offline).segment(b" the")


def test_a_hub_that_hangs_up(hub: Hub, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/model", small / "small-byte-level")
    hub.hangs_up = True
    monkeypatch.setattr("time.sleep", lambda _: None)  # between attempts of the library
    with pytest.raises(TokenizerError, match="cannot be downloaded"):
        load_tokenizer("org/model")


def test_the_token_comes_from_the_environment(
    hub: Hub, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/private", small / "small-byte-level")
    hub.token = "hf_secret"
    for token in ("", "hf_wrong"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(TokenizerError, match="org/private") as caught:
            load_tokenizer("org/private")
        assert "hf_wrong" not in f"{caught.value.message} {caught.value.hint}"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert load_tokenizer("org/private").vocabulary.revision == OLD


def test_a_repo_that_the_hub_does_not_have_or_guards(hub: Hub, tmp_path: Path, cli: Cli) -> None:
    hub.gated = ("a/gated",)
    result = cli("build", "no/body", "bytes", env=hub.environment())
    fails(result, "no/body is neither a repo on the hub")
    assert not list(tmp_path.glob("*.safetensors"))
    assert "a/gated is gated" in not_loaded("a/gated")
    assert "a/gated at revision v2 is gated" in not_loaded("a/gated@v2")


CODE = """
from transformers import PreTrainedTokenizerFast

class OddTokenizer(PreTrainedTokenizerFast):
    pass

print("code of the repo runs")
"""


def test_code_of_a_repo_runs_only_if_trusted_and_is_noted(
    hub: Hub, small: Path, tmp_path: Path, cli: Cli
) -> None:
    auto_map = {"AutoTokenizer": [None, "odd.OddTokenizer"]}
    own = {"auto_map": auto_map, "tokenizer_class": "OddTokenizer"}
    folder = copy_folder(small / "small-byte-level", tmp_path / "odd", tokenizer_config=own)
    (folder / "config.json").write_text('{"vocab_size": 1280, "auto_map": {"AutoConfig": "x.Y"}}')
    (folder / "odd.py").write_text(CODE)
    hub.add("org/odd", folder)
    args = ["build", "--student-model", "org/odd", "--teacher-model", "bytes"]
    env = hub.environment(HF_MODULES_CACHE=str(tmp_path / "modules"))
    result = cli(*args, env=env)
    assert result.returncode == 1
    assert "error: org/odd requires custom tokenizer code\n" in result.stderr
    assert "allow the code with --trust-remote-code" in result.stderr
    assert "code of the repo runs" not in result.stdout
    result = works(cli(*args, "--trust-remote-code", env=env))
    assert f"note: xtok ran the tokenizer code of org/odd at {OLD}" in result.stderr
    assert "code of the repo runs" in result.stderr


def test_has_weights_downloads_no_weights(hub: Hub, small: Path, tmp_path: Path) -> None:
    for name, file in (("whole", "model.safetensors"), ("shards", "model.safetensors.index.json")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / file).write_bytes(b"{}")
        hub.add(f"org/{name}", folder)
    hub.add("org/none", small / "small-digits")
    has = [Checkpoint(f"org/{name}").has_weights() for name in ("whole", "shards", "none")]
    assert has == [True, True, False]
    assert dict(hub.downloads) == {"model.safetensors.index.json": 1}
