"""`xtok project`: what is kept of runs that fail or are killed, and what is taken up again."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import stored_teachers as teachers
from conftest import Cli
from stored_teachers import TEXTS, Row

import xtok
from xtok.config import ProjectConfig
from xtok.errors import XtokError
from xtok.teachers.files import Projected
from xtok.teachers.translator import Translator
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair

MODELS = ("small-digits", "small-byte-level")


@pytest.fixture(scope="module")
def rows(byte_level: Tokenizer) -> list[Row]:
    return teachers.rows_of(byte_level, TEXTS, with_text=True)


@pytest.fixture(scope="module")
def pair(byte_level: Tokenizer, digits: Tokenizer) -> Pair:
    return xtok.pair(digits, byte_level)


@contextmanager
def stopping(label: str, total: int) -> Iterator[Callable[[int, int], object]]:
    """Interrupt within the third part."""
    steps: list[int] = []

    def advance(size: int, tokens: int) -> None:
        steps.append(tokens)
        if len(steps) == 3:
            raise KeyboardInterrupt

    yield advance


Run = Callable[..., Projected]


@pytest.fixture
def run(rows: list[Row], pair: Pair, back_map: Path, tmp_path: Path) -> Run:
    """Project three row groups of two rows each."""
    path = teachers.write_neutral(tmp_path / "a.parquet", rows)
    return partial(xtok.project, path, pair, back_map=back_map)


@pytest.fixture
def whole(run: Run, tmp_path: Path) -> bytes:
    """What a run in one go writes."""
    run(tmp_path / "whole.parquet")
    return (tmp_path / "whole.parquet").read_bytes()


@pytest.fixture
def stopped(run: Run, tmp_path: Path) -> Path:
    """The folder of a run that was stopped: it has two parts."""
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out.parquet", text_progress=stopping)
    folder = tmp_path / "out.parquet.checkpoint"
    assert names(folder) == {"job.json", "000000.part", "000001.part"}
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows are projected at a time."""
    sizes: list[int] = []
    project = Translator.project

    def counting(self: Translator, texts: Any, *arguments: Any) -> Any:
        sizes.append(len(texts))
        return project(self, texts, *arguments)

    monkeypatch.setattr(Translator, "project", counting)
    return sizes


# What is taken up


def test_what_is_done_is_not_done_again(
    run: Run, whole: bytes, stopped: Path, made: list[int], tmp_path: Path
) -> None:
    """And the bytes are those of a run in one go."""
    notes: list[str] = []
    out = tmp_path / "out.parquet"
    assert run(out, note=notes.append).documents == 6
    assert made == [2]
    assert notes[1:] == [f"resuming from 2 parts in {stopped}"]
    assert out.read_bytes() == whole
    assert names(tmp_path) == {"a.parquet", "whole.parquet", "out.parquet"}


def test_a_part_is_read_once(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is hashed as it is written, and its columns are known then."""
    read, before = list[str](), Path.open

    def counting(self: Path, mode: str = "r", *arguments: Any) -> Any:
        opened = before(self, mode, *arguments)
        if self.suffix == ".part" and mode == "rb":
            read.append(self.name)
        return opened

    monkeypatch.setattr(Path, "open", counting)
    run(tmp_path / "out.parquet")
    assert read == ["000000.part", "000001.part", "000002.part"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "another shard's": lambda part: shutil.copy(part.with_name("000000.part"), part),
    "flipped": flip,
    "truncated": lambda part: os.truncate(part, part.stat().st_size - 40),
    "longer": lambda part: part.write_bytes(part.read_bytes() + b"x"),
    "empty": lambda part: os.truncate(part, 0),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_parts_are_made_anew(
    name: str, run: Run, whole: bytes, stopped: Path, made: list[int], tmp_path: Path
) -> None:
    DAMAGE[name](stopped / "000001.part")
    run(tmp_path / "out.parquet")
    assert made == [2, 2]
    assert (tmp_path / "out.parquet").read_bytes() == whole


@pytest.mark.parametrize("plan", [b"\xff\x00{", b"[]", None], ids=["binary", "other", "none"])
def test_parts_know_their_job_without_its_file(
    plan: bytes | None, run: Run, whole: bytes, stopped: Path, made: list[int], tmp_path: Path
) -> None:
    (stopped / "job.json").unlink()
    if plan is not None:
        (stopped / "job.json").write_bytes(plan)
    other = ProjectConfig(top_k=2)
    run(tmp_path / "other.parquet", other)
    shutil.copytree(stopped, tmp_path / "less.parquet.checkpoint")
    run(tmp_path / "less.parquet", other)
    assert made == [2] * 6  # none of them taken
    assert (tmp_path / "less.parquet").read_bytes() == (tmp_path / "other.parquet").read_bytes()
    run(tmp_path / "out.parquet")
    assert made == [2] * 7
    assert (tmp_path / "out.parquet").read_bytes() == whole


def test_another_job_takes_none_of_the_parts(run: Run, stopped: Path, tmp_path: Path) -> None:
    with pytest.raises(XtokError, match="options") as error:
        run(tmp_path / "out.parquet", ProjectConfig(top_k=3))
    assert str(stopped) in error.value.hint
    assert names(stopped) == {"job.json", "000000.part", "000001.part"}


def test_a_part_that_is_damaged_meanwhile_is_named(run: Run, whole: bytes, tmp_path: Path) -> None:
    part = tmp_path / "out.parquet.checkpoint" / "000000.part"

    @contextmanager
    def damaging(label: str, total: int) -> Iterator[Callable[[int, int], object]]:
        yield lambda size, tokens: None
        flip(part)

    out = tmp_path / "out.parquet"
    with pytest.raises(XtokError, match=str(part)):
        run(out, text_progress=damaging)
    assert not out.exists()
    run(out)
    assert out.read_bytes() == whole


CHAT = [
    {"role": "user", "content": "How many steps did it take?"},
    {"role": "assistant", "content": "There were 201 of them in 2012."},
]


def test_contents_of_templates_are_part_of_a_job(
    pair: Pair, back_map: Path, tmp_path: Path
) -> None:
    template = tmp_path / "student.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}")
    ids = xtok.render(pair.tokenizers[1], CHAT, template="plain").ids.tolist()
    row = teachers.predicted(ids, 1280, 8)
    path = teachers.write_neutral(tmp_path / "a.parquet", [{"messages": CHAT, **row}] * 8)
    run = partial(
        xtok.project, path, pair, tmp_path / "out.parquet", back_map=back_map,
        student_template=template, teacher_template="plain",
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        run(text_progress=stopping)
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}")
    with pytest.raises(XtokError, match="chat templates"):
        run()


def test_a_models_own_template_is_part_of_a_job(
    small: Path, digits: Tokenizer, rows: list[Row], back_map: Path, tmp_path: Path
) -> None:
    path = teachers.write_neutral(tmp_path / "a.parquet", rows)
    model = tmp_path / "model"
    shutil.copytree(small / "small-byte-level", model)
    out = tmp_path / "out.parquet"
    with pytest.raises(KeyboardInterrupt):
        xtok.project(path, xtok.pair(digits, model), out, back_map=back_map, text_progress=stopping)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(XtokError, match="chat templates"):
        xtok.project(path, xtok.pair(digits, model), out, back_map=back_map)


@pytest.mark.parametrize("with_map", [True, False])
def test_a_tokenizers_definition_is_part_of_a_job(
    with_map: bool, small: Path, digits: Tokenizer, rows: list[Row], back_map: Path, tmp_path: Path
) -> None:
    """A flag of an added token, which changes no token and no id of most texts."""
    path = teachers.write_neutral(tmp_path / "a.parquet", rows)
    model, out = tmp_path / "model", tmp_path / "out.parquet"
    shutil.copytree(small / "small-byte-level", model)
    options: dict[str, Any] = {"back_map": back_map} if with_map else {}
    with pytest.raises(KeyboardInterrupt):
        xtok.project(path, xtok.pair(digits, model), out, text_progress=stopping, **options)
    document = json.loads((model / "tokenizer.json").read_text())
    document["added_tokens"][-1]["lstrip"] = True
    (model / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(XtokError, match="is of another run, of other models"):
        xtok.project(path, xtok.pair(digits, model), out, **options)


def test_the_config_of_compressed_rows_is_part_of_a_job(
    pair: Pair, rows: list[Row], back_map: Path, tmp_path: Path
) -> None:
    path = teachers.write_distillkit(tmp_path / "a.parquet", rows * 3, compressed=True, d=1280)
    out = tmp_path / "out.parquet"
    with pytest.raises(KeyboardInterrupt):
        xtok.project(path, pair, out, back_map=back_map, text_progress=stopping)
    config = tmp_path / "compression_config.yaml"
    config.write_text(config.read_text().replace("residual_bins: []", "residual_bins: null"))
    with pytest.raises(XtokError, match="files"):
        xtok.project(path, pair, out, back_map=back_map)


# What fails


def test_an_error_keeps_what_is_done(
    rows: list[Row], pair: Pair, back_map: Path, made: list[int], tmp_path: Path
) -> None:
    bad = json.loads(json.dumps(rows))
    bad[5]["topk_ids"][3] = [4] * 8
    path = teachers.write_neutral(tmp_path / "a.parquet", bad)
    for expected in ([2, 2], [2, 2]):  # the second run makes none of them again
        with pytest.raises(XtokError, match="row 5, position 3: "):
            xtok.project(path, pair, tmp_path / "out.parquet", back_map=back_map)
        assert made == expected
    kept = names(tmp_path / "out.parquet.checkpoint")
    assert kept == {"job.json", "000000.part", "000001.part"}
    assert names(tmp_path) == {"a.parquet", "out.parquet.checkpoint"}


def test_no_cluster_keeps_what_is_done(
    cli: Cli, small: Path, back_map: Path, stopped: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
    done = cli(
        "project", tmp_path / "a.parquet", *(small / name for name in MODELS), "--map", back_map,
        "-o", "out.parquet", "--engine", "ray", "--address", "nowhere",
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: there is no Ray cluster at nowhere: " in done.stderr
    assert "Traceback" not in done.stderr
    assert names(stopped) == {"job.json", "000000.part", "000001.part"}


def test_a_file_that_changes_while_it_is_read(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"

    @contextmanager
    def changing(label: str, total: int) -> Iterator[Callable[[int, int], object]]:
        yield lambda size, tokens: None
        with path.open("ab") as file:
            file.write(b"more")

    with pytest.raises(XtokError, match="changed") as error:
        run(tmp_path / "out.parquet", text_progress=changing)
    assert error.value.message.startswith(str(path))
    assert error.value.hint.endswith(f"rm -r {tmp_path / 'out.parquet.checkpoint'}")
    assert not (tmp_path / "out.parquet").exists()


def test_parts_behind_a_link(run: Run, whole: bytes, tmp_path: Path) -> None:
    """As of a folder on another disk: its parts go, too."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "out.parquet.checkpoint").symlink_to(tmp_path / "scratch")
    out = tmp_path / "out.parquet"
    with pytest.raises(KeyboardInterrupt):
        run(out, text_progress=stopping)
    assert names(tmp_path / "scratch") == {"job.json", "000000.part", "000001.part"}
    run(out)
    assert out.read_bytes() == whole
    assert names(tmp_path) == {"a.parquet", "out.parquet", "whole.parquet"}


# Processes


@pytest.fixture
def large(rows: list[Row], tmp_path: Path) -> Path:
    """A cache of many parts."""
    return teachers.write_neutral(tmp_path / "large.parquet", rows * 60)


@pytest.fixture
def command(small: Path, back_map: Path, large: Path) -> list[str]:
    models = [str(small / name) for name in MODELS]
    return ["project", str(large), *models, "--map", str(back_map), "-o", "out.parquet"]


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process; the block begins when it has made some parts."""
    with subprocess.Popen(
        [sys.executable, "-m", "xtok", *command], cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            while not (folder / "out.parquet.checkpoint" / "000002.part").exists():
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_killed_process_goes_on(
    how: str, cli: Cli, command: list[str], large: Path, pair: Pair, back_map: Path, tmp_path: Path
) -> None:
    number = signal.Signals[how]
    with running(command, tmp_path) as process:
        process.send_signal(number)
        _, told = process.communicate()
    kept = len([*(tmp_path / "out.parquet.checkpoint").glob("*.part")])
    assert 3 <= kept < 180
    assert not (tmp_path / "out.parquet").exists()
    if how == "SIGKILL":
        assert process.returncode == -number
    else:
        word = "interrupted" if how == "SIGINT" else "terminated"
        assert process.returncode == 128 + number
        assert told.splitlines()[-1] == (
            f"{word}: {kept} parts are kept; run the same command again to resume"
        )
    done = cli(*command)
    assert (done.returncode, done.stdout) == (0, "out.parquet\n"), done.stderr
    assert f"note: resuming from {kept} parts in out.parquet.checkpoint\n" in done.stderr
    xtok.project(large, pair, tmp_path / "whole.parquet", back_map=back_map)
    assert (tmp_path / "out.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert names(tmp_path) == {"large.parquet", "out.parquet", "whole.parquet"}


def test_two_runs_of_one_output(cli: Cli, command: list[str], tmp_path: Path) -> None:
    with running(command, tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        done = cli(*command, "-q")
        assert done.returncode == 1
        assert done.stderr == (
            "error: another run writes out.parquet: it works in out.parquet.checkpoint\n"
            "hint: wait until it has ended, or give another output\n"
        )
        process.send_signal(signal.SIGCONT)
        told, _ = process.communicate()
    assert (process.returncode, told) == (0, "out.parquet\n")


def test_a_full_disk(
    cli: Cli, command: list[str], large: Path, pair: Pair, back_map: Path, tmp_path: Path
) -> None:
    """One line says so; nothing is half-written, and what is done is kept."""
    limit = 60_000  # more than a part, less than the output
    done = subprocess.run(
        [sys.executable, "-m", "xtok", *command], cwd=tmp_path, capture_output=True, text=True,
        check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 1
    assert "out.parquet cannot be written: " in done.stderr
    assert done.stderr.count("error: ") == done.stderr.count("hint: ") == 1
    assert not (tmp_path / "out.parquet").exists()
    assert not [*tmp_path.rglob("*.tmp")]
    assert len([*(tmp_path / "out.parquet.checkpoint").glob("*.part")]) == 180
    assert cli(*command).returncode == 0
    xtok.project(large, pair, tmp_path / "whole.parquet", back_map=back_map)
    assert (tmp_path / "out.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
