"""`xtok project`: parts that a failed or killed run leaves, and their reuse by later runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import stored_teachers as teachers
from chat_families import CHAT
from checks import Done, fails, killed, on_a_full_disk, works
from conftest import Cli
from forked import Forks
from stored_teachers import Row

import xtok
from xtok.config import ProjectConfig
from xtok.errors import XtokError
from xtok.teachers.project import Projected
from xtok.teachers.translator import Translator
from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.pairs import Pair


@contextmanager
def stopping(label: str, total: int) -> Iterator[Callable[[int, int], object]]:
    """Raise an interrupt during the third part."""
    steps: list[int] = []

    def advance(size: int, tokens: int) -> None:
        steps.append(tokens)
        if len(steps) == 3:
            raise KeyboardInterrupt

    yield advance


@contextmanager
def at_the_end(change: Callable[[], object]) -> Iterator[Callable[[int, int], object]]:
    """Change a file after all parts are made."""
    yield lambda size, tokens: None
    change()


Run = Callable[..., Projected]


@pytest.fixture
def run(cache_file: Path, back: Pair, back_map: Path) -> Run:
    return partial(xtok.project, cache_file, back, back_map=back_map)


@pytest.fixture
def whole_output(run: Run, tmp_path: Path) -> bytes:
    """Return the output of an uninterrupted run."""
    run(tmp_path / "whole.parquet")
    return (tmp_path / "whole.parquet").read_bytes()


KEPT = {"job.json", "000000.part", "000001.part"}


@pytest.fixture
def stopped(run: Run, tmp_path: Path) -> Path:
    """Return the folder of a stopped run with two parts."""
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out.parquet", progress=stopping)
    folder = tmp_path / "out.parquet.checkpoint"
    assert file_names(folder) == KEPT
    return folder


def file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def batch_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of rows in each projected batch."""
    sizes: list[int] = []
    project = Translator.project

    def counting(self: Translator, texts: Any, *arguments: Any) -> Any:
        sizes.append(len(texts))
        return project(self, texts, *arguments)

    monkeypatch.setattr(Translator, "project", counting)
    return sizes


# Reuse of parts


def test_finished_parts_are_reused(
    run: Run, whole_output: bytes, stopped: Path, batch_sizes: list[int], tmp_path: Path
) -> None:
    """The output equals the output of an uninterrupted run, byte for byte."""
    notes: list[str] = []
    out = tmp_path / "out.parquet"
    assert run(out, note=notes.append).documents == 6
    assert batch_sizes == [2]
    assert notes[1:] == [f"resuming from 2 parts in {stopped}"]
    assert out.read_bytes() == whole_output
    assert file_names(tmp_path) == {"a.parquet", "whole.parquet", "out.parquet"}


def test_a_part_is_read_once(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is hashed when it is written, and its columns are known from the write."""
    read, before = list[str](), Path.open

    def counting(path: Path, *mode: Any, **options: Any) -> Any:
        if path.suffix == ".part" and path.exists():
            read.append(path.name)
        return before(path, *mode, **options)

    monkeypatch.setattr(Path, "open", counting)
    run(tmp_path / "out.parquet")
    parts = ["000000.part", "000001.part", "000002.part"]
    assert read[:3] == parts
    assert sorted(read[3:]) == parts  # only the first bytes of each part, before it is removed


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
def test_damaged_parts_are_written_again(
    name: str, run: Run, whole_output: bytes, stopped: Path, batch_sizes: list[int], tmp_path: Path
) -> None:
    DAMAGE[name](stopped / "000001.part")
    run(tmp_path / "out.parquet")
    assert batch_sizes == [2, 2]
    assert (tmp_path / "out.parquet").read_bytes() == whole_output


def test_parts_contain_their_job(
    run: Run, whole_output: bytes, stopped: Path, batch_sizes: list[int], tmp_path: Path
) -> None:
    (stopped / "job.json").unlink()
    other = ProjectConfig(top_k=2)
    run(tmp_path / "other.parquet", other)
    shutil.copytree(stopped, tmp_path / "less.parquet.checkpoint")
    run(tmp_path / "less.parquet", other)
    assert batch_sizes == [2] * 6  # no part is reused
    assert (tmp_path / "less.parquet").read_bytes() == (tmp_path / "other.parquet").read_bytes()
    run(tmp_path / "out.parquet")
    assert batch_sizes == [2] * 7
    assert (tmp_path / "out.parquet").read_bytes() == whole_output


def test_another_job_does_not_use_the_parts(run: Run, stopped: Path, tmp_path: Path) -> None:
    with pytest.raises(XtokError, match="options") as error:
        run(tmp_path / "out.parquet", ProjectConfig(top_k=3))
    assert str(stopped) in error.value.hint
    assert file_names(stopped) == KEPT


def test_an_error_names_a_part_damaged_during_the_run(
    run: Run, whole_output: bytes, tmp_path: Path
) -> None:
    part, out = tmp_path / "out.parquet.checkpoint" / "000000.part", tmp_path / "out.parquet"
    with pytest.raises(XtokError, match=str(part)):
        run(out, progress=lambda *_: at_the_end(lambda: flip(part)))
    assert not out.exists()
    run(out)
    assert out.read_bytes() == whole_output


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text() if path.exists() else ""
    path.write_text(text.replace(old, new) or new)


def flagged(path: Path) -> None:
    """Change a flag of an added token; most texts keep their tokens and ids."""
    document = json.loads(path.read_text())
    document["added_tokens"][-1]["lstrip"] = True
    path.write_text(json.dumps(document))


# Each change, and the name of the changed input in the message.
PARTS_OF_A_JOB: dict[str, tuple[Callable[[Path], object], str]] = {
    "a template": (lambda path: replaced(path / "student.jinja", "<", "["), "chat templates"),
    "a model's own template": (
        lambda path: replaced(path / "model" / "chat_template.jinja", "", TURNS),
        "chat templates"),
    "a tokenizer": (lambda path: flagged(path / "model" / "tokenizer.json"), "models"),
    "the config of compressed rows": (
        lambda path: replaced(path / "compression_config.yaml", "bins: []", "bins: null"),
        "files"),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS_OF_A_JOB)
def test_changed_inputs_are_another_job(
    name: str, small: Path, stored: list[Row], digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    change, words = PARTS_OF_A_JOB[name]
    model = tmp_path / "model"
    config = ProjectConfig()
    shutil.copytree(small / "small-byte-level", model)
    path = tmp_path / "a.parquet"
    if name == "a template":
        (tmp_path / "student.jinja").write_text(TURNS)
        template = str(tmp_path / "student.jinja")
        config = ProjectConfig(student_template=template, teacher_template="plain")
        ids = xtok.render(load_tokenizer(model), CHAT, template="plain").ids.tolist()
        row = {"messages": CHAT, **teachers.predicted(ids, 1280, 8)}
        teachers.write_neutral(path, [row] * 8)
    elif name.startswith("the config"):
        teachers.write_distillkit(path, stored * 3, compressed=True, d=1280)
    else:
        teachers.write_neutral(path, stored)

    def run(**more: Any) -> None:
        pair = xtok.load_pair(digits, model)
        xtok.project(path, pair, tmp_path / "out.parquet", config, back_map=back_map, **more)

    with pytest.raises(KeyboardInterrupt):
        run(progress=stopping)
    change(tmp_path)
    with pytest.raises(XtokError, match=f"another run, .*{words}"):
        run()


# Failures


def test_finished_parts_survive_an_error(
    stored: list[Row], run: Run, cache_file: Path, batch_sizes: list[int], tmp_path: Path
) -> None:
    bad = json.loads(json.dumps(stored))
    bad[5]["topk_ids"][3] = [4] * 8
    teachers.write_neutral(cache_file, bad)
    for _ in range(2):  # the second run reuses both parts
        with pytest.raises(XtokError, match="row 5, position 3: "):
            run(tmp_path / "out.parquet")
        assert batch_sizes == [2, 2]
    assert file_names(tmp_path / "out.parquet.checkpoint") == KEPT
    assert file_names(tmp_path) == {"a.parquet", "out.parquet.checkpoint"}


def test_finished_parts_survive_a_missing_cluster(
    cli: Cli, models: list[str], back_map: Path, stopped: Path, cache_file: Path
) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
    options = "-o", "out.parquet", "--engine", "ray", "--address", "nowhere"
    result = cli("project", cache_file, *models, "--map", back_map, *options)
    fails(result, "Ray cluster at nowhere: ")
    assert file_names(stopped) == KEPT


def test_a_file_that_changes_while_it_is_read(run: Run, cache_file: Path, tmp_path: Path) -> None:
    grows = partial(cache_file.write_bytes, cache_file.read_bytes() + b"more")
    with pytest.raises(XtokError, match="changed") as error:
        run(tmp_path / "out.parquet", progress=lambda *_: at_the_end(grows))
    assert error.value.message.startswith(str(cache_file))
    assert error.value.hint.endswith(f"rm {tmp_path / 'out.parquet.checkpoint'}/*.part")
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("is_link", [False, True], ids=["folder", "link"])
def test_other_files_in_the_folder_of_parts_stay(
    is_link: bool, run: Run, whole_output: bytes, tmp_path: Path
) -> None:
    """Parts may be in the user's folder or behind a link, for example to another disk."""
    folder, scratch = tmp_path / "out.parquet.checkpoint", tmp_path / "scratch"
    others = {"thesis.txt", "notes.part", "0000001.part", "data"}
    (scratch / "data").mkdir(parents=True)
    for name in ("thesis.txt", "notes.part", "0000001.part", "data/000001.part"):
        (scratch / name).write_text("precious")
    if is_link:
        folder.symlink_to(scratch)
    else:
        scratch.rename(folder)
    out = tmp_path / "out.parquet"
    with pytest.raises(KeyboardInterrupt):
        run(out, progress=stopping)
    assert file_names(folder) == KEPT | others
    run(out)
    assert out.read_bytes() == whole_output
    assert file_names(folder) == others
    assert (folder / "data" / "000001.part").read_text() == "precious"
    assert folder.is_symlink() == is_link


@pytest.mark.parametrize("name", ["job.json", "000001.part", "000007.part"])
def test_a_file_of_another_program_stays(
    name: str, run: Run, cache_file: Path, tmp_path: Path
) -> None:
    """If the file has the name of a part or plan that a run needs, the run fails immediately."""
    folder, out = tmp_path / "out.parquet.checkpoint", tmp_path / "out.parquet"
    folder.mkdir()
    (folder / name).write_text('{"of": "my scheduler"}')
    if name == "000007.part":  # the run has only three parts
        assert run(out).documents == 6
    else:
        with pytest.raises(XtokError, match=f"^{folder / name} already exists"):
            run(out)
    assert file_names(folder) == {name}
    assert (folder / name).read_text() == '{"of": "my scheduler"}'


# Processes


@pytest.fixture
def command(models: list[str], back_map: Path, cache_file: Path) -> list[str]:
    """Project a cache of three parts."""
    return ["project", str(cache_file), *models, "--map", str(back_map), "-o", "out.parquet"]


# Sends the signal when the third part is written, before it is renamed.
IN_THE_THIRD_PART = """
from pathlib import Path
replace = Path.replace
def replacing(self, target):
    if Path(target).name == "000002.part":
        os.kill(os.getpid(), stop)
    return replace(self, target)
Path.replace = replacing
"""


def test_a_run_killed_before_its_first_part_does_not_block_the_output(
    command: list[str], run: Run, whole_output: bytes, tmp_path: Path, forks: Forks
) -> None:
    code = IN_THE_THIRD_PART.replace("000002", "000000")
    killed(code, "SIGKILL", [*command, "-k", "3"], tmp_path, forks)
    assert "job.json" in file_names(tmp_path / "out.parquet.checkpoint")
    run(tmp_path / "out.parquet")
    assert (tmp_path / "out.parquet").read_bytes() == whole_output
    assert file_names(tmp_path) == {"a.parquet", "out.parquet", "whole.parquet"}


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_killed_run_resumes(
    how: str, cli: Cli, command: list[str], whole_output: bytes, tmp_path: Path, forks: Forks
) -> None:
    result = killed(IN_THE_THIRD_PART, how, command, tmp_path, forks)
    assert len([*(tmp_path / "out.parquet.checkpoint").glob("*.part")]) == 2
    assert not (tmp_path / "out.parquet").exists()
    number = signal.Signals[how]
    if how == "SIGKILL":
        assert result.returncode == -number
    else:
        word = "interrupted" if how == "SIGINT" else "terminated"
        assert result.returncode == 128 + number
        assert result.stderr.splitlines()[-2:] == [
            "note: 2 parts are kept; run the same command again to resume", word
        ]  # fmt: skip
    note = "note: resuming from 2 parts in out.parquet.checkpoint\n"
    goes_on(cli(*command), note, whole_output, tmp_path)


def goes_on(result: Done, note: str, whole_output: bytes, folder: Path) -> None:
    """Check that a resumed command writes the same output as an uninterrupted run."""
    assert works(result).stdout == "out.parquet\n"
    assert note in result.stderr
    assert (folder / "out.parquet").read_bytes() == whole_output
    assert file_names(folder) == {"a.parquet", "out.parquet", "whole.parquet"}


def test_a_second_run_with_the_same_output_is_an_error(
    cli: Cli, command: list[str], run: Run, whole_output: bytes, tmp_path: Path
) -> None:
    """The second command runs when the first has all parts, but no output."""

    def again() -> None:
        result = cli(*command, "-q")
        fails(result, "another run is writing out.parquet")

    run(tmp_path / "out.parquet", progress=lambda *_: at_the_end(again))
    assert (tmp_path / "out.parquet").read_bytes() == whole_output


def test_outputs_in_the_same_folder_share_a_config(run: Run, tmp_path: Path) -> None:
    """The output and DistillKit's config are written together."""
    folder = tmp_path / "made"
    ours, config = ProjectConfig(to="distillkit", top_k=8), folder / "compression_config.yaml"
    run(folder / "a.parquet", ours)
    run(folder / "b.parquet", ours)
    with pytest.raises(XtokError, match="other predictions"):
        run(folder / "c.parquet", replace(ours, top_k=4))
    assert "k: 8\n" in config.read_text()
    assert file_names(folder) == {"a.parquet", "b.parquet", config.name}

    def another() -> None:
        run(folder / "d.parquet", ours)

    config.unlink()
    with pytest.raises(XtokError, match="other predictions"):
        run(
            folder / "c.parquet",
            replace(ours, top_k=4),
            progress=lambda *_: at_the_end(another),
        )
    assert "k: 8\n" in config.read_text()
    kept = {"a.parquet", "b.parquet", "c.parquet.checkpoint", "d.parquet", config.name}
    assert file_names(folder) == kept


def test_a_run_that_fails_leaves_no_config(run: Run, tmp_path: Path) -> None:
    """The parts are reused even if another file appears next to the output."""
    folder = tmp_path / "made"

    def interrupted() -> None:
        (folder / "b.parquet").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(
            folder / "a.parquet",
            ProjectConfig(to="distillkit"),
            progress=lambda *_: at_the_end(interrupted),
        )
    assert file_names(folder) == {"a.parquet.checkpoint", "b.parquet"}


def test_a_full_disk(
    cli: Cli, command: list[str], whole_output: bytes, tmp_path: Path, forks: Forks
) -> None:
    """The error has one line; no file is incomplete, and finished parts are kept."""
    size = len(whole_output) - 1000  # larger than a part, smaller than the output
    result = on_a_full_disk(forks, size, command, tmp_path)
    assert result.returncode == 1
    assert "out.parquet cannot be written: " in result.stderr
    assert result.stderr.count("error: ") == result.stderr.count("hint: ") == 1
    assert not (tmp_path / "out.parquet").exists()
    assert not [*tmp_path.rglob("*.tmp")]
    assert len([*(tmp_path / "out.parquet.checkpoint").glob("*.part")]) == 3
    goes_on(cli(*command), "note: resuming from 3 parts in ", whole_output, tmp_path)
