"""Lists of pairs, `--dry-run`, and the job script for clusters."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Cli
from test_cli import fails, pair, two_files

import xtok
from xtok.config import BuildConfig, Loss
from xtok.errors import XtokError
from xtok.maps.names import name_of_map
from xtok.stages.build import Pair, build_pairs, read_pairs
from xtok.stages.plans import difference, plan
from xtok.tokenizers import Tokenizer, load_tokenizer


@pytest.fixture
def listed(small: Path, tmp_path: Path) -> Path:
    """A list of two pairs of fast tokenizers, one of them named, and of one that is not there."""
    path = tmp_path / "pairs.txt"
    model = small / "small.model"
    path.write_text(
        f"# student teacher output\n\n{model} {model}\n  # more\n"
        f"{model}\tbytes\tto bytes.safetensors\nnone.model {model}\n"
    )
    return path


def test_a_list_is_read(small: Path, listed: Path, tmp_path: Path) -> None:
    model = str(small / "small.model")
    first = tmp_path / "small_to_small_top4.safetensors"
    last = tmp_path / "none_to_small_top4.safetensors"
    assert read_pairs(listed, tmp_path, BuildConfig()) == [
        Pair(line=3, student=model, teacher=model, output=first),
        Pair(line=5, student=model, teacher="bytes", output=tmp_path / "to bytes.safetensors"),
        Pair(line=6, student="none.model", teacher=model, output=last),
    ]
    names = [p.output.name for p in read_pairs(listed, tmp_path, BuildConfig(scale_trick=False))]
    assert names[0] == "small_to_small_top4_no-scale-trick.safetensors"


@pytest.mark.parametrize(
    ("loss", "options", "texts", "name"),
    [
        (None, {}, (), "top4"),
        (None, {"weights": "prior", "target": "both"}, (), "top4_weights-prior_target-both"),
        (None, {"exact_match": False}, (), "top4_no-exact-match"),
        (
            None,
            {"reverse_pass": False, "max_pieces": 2, "special_tokens": "off"},
            (),
            "top4_max-pieces-2_no-reverse-pass_special-tokens-off",
        ),
        (None, {"ignore_student_ids": (1, 2)}, (), "top4_ignore-student-ids-3a316d"),
        ("p-kl", {}, (), "p-kl_top8"),
        ("gold", {}, (), "gold_top8"),
        ("h-kl", {"top_k": 4, "scale_trick": True}, (), "h-kl_top4_scale-trick"),
        ("p-kl", {"exact_match": True}, (), "p-kl_top8_exact-match"),
        (
            None,
            {"weights": "prior", "scale_trick": False},
            ("a/wiki.de.jsonl", "b.txt"),
            "top4_text-wiki.de-and-1",
        ),
    ],
)
def test_a_name_tells_what_differs(
    loss: Loss | None, options: dict[str, Any], texts: Sequence[str], name: str
) -> None:
    config = BuildConfig.for_loss(loss, **options) if loss else BuildConfig(**options)
    found = name_of_map("a", "b", config, loss=loss, texts=texts)
    assert found == f"a_to_b_{name}.safetensors"


def test_a_line_ends_at_a_line_end_only(tmp_path: Path) -> None:
    listed = tmp_path / "pairs.tsv"
    listed.write_text("a\tb\tto \u2028 c.pt\r\nb\ta\tx.pt", encoding="utf-8", newline="")
    found = read_pairs(listed, tmp_path, BuildConfig())
    assert [(p.line, p.output.name) for p in found] == [(1, "to \u2028 c.pt"), (2, "x.pt")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing\n", "is empty"),
        ("a b\none\n", "line 2 of .* has 1 column, expected 2 or 3"),
        ("a b c d\n", "line 1 of .* has 4 columns, expected 2 or 3"),
        ("a b x.pt\n\nc d x.pt\n", r"line 3 of .* has the same output as line 1: x\.pt"),
        ("a b x.pt\nc d y/../x.pt\n", r"line 2 of .* has the same output as line 1: y/\.\./x"),
        ("nope:a b\n", "nope: is not a prefix"),
        ("\udcff", "cannot be read"),
    ],
)
def test_lists_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "pairs.txt"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(XtokError, match=message):
        read_pairs(path, tmp_path, BuildConfig())


def test_each_tokenizer_is_loaded_once_and_let_go(small: Path, tmp_path: Path) -> None:
    model = str(small / "small.model")
    loads = []

    def load(name: str) -> Tokenizer:
        loads.append(name)
        return load_tokenizer(name)

    pairs = [
        Pair(line=i, student=student, teacher=teacher, output=tmp_path / f"{i}.safetensors")
        for i, (student, teacher) in enumerate([(model, model), (model, "bytes"), ("bytes", model)])
    ]
    results = list(build_pairs(pairs, load=load))
    assert loads == [model, "bytes"]
    for result, one in zip(results, pairs, strict=True):
        assert result.error is None
        xtok.build(one.student, one.teacher).save(tmp_path / "alone.safetensors")
        assert one.output.read_bytes() == (tmp_path / "alone.safetensors").read_bytes()


def test_a_list_of_an_editor_that_marks_utf_8(tmp_path: Path) -> None:
    (tmp_path / "pairs.txt").write_bytes(b"\xef\xbb\xbfa b\n")
    [pair] = read_pairs(tmp_path / "pairs.txt", tmp_path, BuildConfig())
    assert (pair.student, pair.teacher) == ("a", "b")


def test_a_home_folder_in_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "pairs.txt").write_text("~/a.model bytes ~/maps/x.pt\n")
    [pair] = read_pairs(tmp_path / "pairs.txt", Path("out"), BuildConfig())
    assert (pair.student, pair.output) == (str(tmp_path / "a.model"), tmp_path / "maps" / "x.pt")


def test_outputs_are_checked_before_the_first_pair_is_built(small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    pairs = [
        Pair(line=i, student="bytes", teacher="bytes", output=tmp_path / name)
        for i, name in enumerate(["a.safetensors", "one.bin", "file/x.pt"], 1)
    ]
    results = build_pairs(pairs)
    assert [next(results).pair.line for _ in range(2)] == [2, 3]
    assert os.listdir(tmp_path) == ["file"]
    assert next(results).projection is not None


def test_what_another_process_wrote_meanwhile_is_kept(small: Path, tmp_path: Path) -> None:
    pairs = [
        Pair(line=i, student="bytes", teacher="bytes", output=tmp_path / f"{i}.safetensors")
        for i in (1, 2)
    ]
    results = build_pairs(pairs, skip_existing=True)
    assert next(results).projection is not None
    shutil.copyfile(pairs[0].output, pairs[1].output)
    last = next(results)
    assert (last.pair.line, last.projection, last.error) == (2, None, None)


CONFIGS = [
    BuildConfig(),
    BuildConfig(exact_match=False, top_k=8),
    BuildConfig(special_tokens="fuzzy", canonicalization="relaxed", ignore_student_ids=(5, 7)),
    BuildConfig.for_loss("p-kl"),
    BuildConfig.for_loss("gold"),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_map_of_the_same_options_is_no_other(
    sentencepiece: Tokenizer, digits: Tokenizer, tmp_path: Path, config: BuildConfig, suffix: str
) -> None:
    path = tmp_path / f"map{suffix}"
    xtok.build(sentencepiece, digits, config).save(path)
    for other in CONFIGS:
        assert (difference(path, sentencepiece, digits, other) is None) == (other == config)


def test_how_a_file_differs(
    small: Path, sentencepiece: Tokenizer, digits: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "map.safetensors"
    pair = sentencepiece, digits
    xtok.build(*pair).save(path)
    wide = load_tokenizer(str(small / "small.model"), vocab_size=2000)
    byte = load_tokenizer(str(small / "small-byte-level"))
    width = byte.vocabulary.vocab_size
    assert difference(path, *pair, BuildConfig(top_k=8)) == "its sort-cut has top_k 4, not 8"
    assert difference(path, *pair, BuildConfig(exact_match=False)) == (
        "its stages are multitoken, reapply-exact, sort-cut"
    )
    assert difference(path, *pair, BuildConfig.for_loss("gold")) == (
        "its multitoken has scale_trick True, not False"
    )
    assert difference(path, wide, digits, BuildConfig()) == "its student is 1000 wide, not 2000"
    other = load_tokenizer(str(small / "small-byte-level"), vocab_size=max(width, 3000))
    narrow = xtok.build(sentencepiece, load_tokenizer(str(small / "small-digits"), vocab_size=3000))
    narrow.save(path)
    assert difference(path, sentencepiece, other, BuildConfig()) == (
        "its teacher small-digits has other tokens than small-byte-level"
    )
    path.write_bytes(path.read_bytes()[:3000])
    assert "is not a whole safetensors file" in str(difference(path, *pair, BuildConfig()))


def test_a_map_that_was_counted_on_other_text(
    sentencepiece: Tokenizer, digits: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "map.safetensors"
    texts = [tmp_path / "a.txt"]
    texts[0].write_text("one two three\n" * 40)
    config = BuildConfig(weights="prior", scale_trick=False)
    xtok.build(sentencepiece, digits, config, texts=texts).save(path)
    assert difference(path, sentencepiece, digits, config, texts) is None
    assert difference(path, sentencepiece, digits, config) == (
        "its stages are multitoken, estimate, reapply-exact"
    )
    texts[0].write_text("one two three\n" * 50)
    assert difference(path, sentencepiece, digits, config, texts) == (
        "it was counted on other text"
    )


def test_a_failed_pair_does_not_end_the_list(
    cli: Cli, small: Path, listed: Path, tmp_path: Path
) -> None:
    done = cli("build-pairs", listed, "--output-dir", "maps")
    assert done.returncode == 1
    assert done.stdout == "maps/small_to_small_top4.safetensors\nmaps/to bytes.safetensors\n"
    lines = done.stderr.splitlines()
    assert "error: line 6: no such file or folder: none.model" in lines
    assert lines[-2] == "error: 1 of 3 pairs of " + str(listed) + " failed: line 6"
    built = sorted((tmp_path / "maps").iterdir())
    before = [path.stat().st_mtime_ns for path in built]
    again = cli("build-pairs", listed, "--output-dir", "maps", "--skip-existing")
    assert (again.returncode, again.stdout) == (1, done.stdout)
    assert "note: line 3: maps/small_to_small_top4.safetensors exists, and is kept" in (
        again.stderr.splitlines()
    )
    assert [path.stat().st_mtime_ns for path in built] == before
    built[0].write_bytes(built[0].read_bytes()[:3000])
    again = cli("build-pairs", listed, "--output-dir", "maps", "--skip-existing")
    assert again.stdout == done.stdout
    assert "exists, and is replaced: maps/small_to_small_top4.safetensors is not a" in again.stderr
    listed.write_text(f"{small / 'small.model'} bytes\n")
    assert cli("build-pairs", listed, "--top-k", "8").stdout == (
        "small_to_bytes_top8.safetensors\n"
    )


def test_a_dry_run_says_what_would_be_written(cli: Cli, small: Path, tmp_path: Path) -> None:
    sides = two_files(small)
    done = cli("build", *sides, "--dry-run")
    assert done.stdout == (
        "small_to_small_top4.safetensors (new): 1,000 × 1,000, 1,000 rows of one entry, "
        "at most 1,000 entries and 41 kB\n"
    )
    assert os.listdir(tmp_path) == []
    assert cli("build", *sides, "--output", "a.safetensors").returncode == 0
    for more, what in (([], "replaced"), (["--skip-existing"], "kept")):
        done = cli("build", *sides, "--output", "a.safetensors", "--dry-run", *more)
        assert done.stdout.startswith(f"a.safetensors (exists, would be {what}): ")
    old = (tmp_path / "a.safetensors").stat().st_mtime_ns
    kept = cli("build", *sides, "--output", "a.safetensors", "--skip-existing")
    assert (kept.returncode, kept.stdout) == (0, "a.safetensors\n")
    assert (tmp_path / "a.safetensors").stat().st_mtime_ns == old
    other = [*sides, "--output", "a.safetensors", "--skip-existing", "--top-k", "8"]
    assert cli("build", *other, "--dry-run").stdout.startswith(
        "a.safetensors (exists, would be replaced: its sort-cut has top_k 4, not 8): "
    )
    done = cli("build", *other)
    note = "note: a.safetensors exists, and is replaced: its sort-cut has top_k 4, not 8"
    assert note in done.stderr.splitlines()
    assert xtok.ProjectionMap.load(tmp_path / "a.safetensors").top_k == 8


def test_a_map_in_a_folder_is_kept_under_the_name_that_it_would_have(
    cli: Cli, small: Path, tmp_path: Path
) -> None:
    (tmp_path / "maps").mkdir()
    for_loss = [*two_files(small), "--for", "p-kl", "--output", "maps", "--skip-existing"]
    name = "maps/small_to_small_p-kl_top8.safetensors"
    planned = cli("build", *for_loss, "--dry-run")
    assert planned.stdout.startswith(f"{name} (new): 1,000 × 1,000, ")
    for told in ("build: ", f"note: {name} exists, and is kept\n"):
        done = cli("build", *for_loss)
        assert (done.returncode, done.stdout) == (0, f"{name}\n")
        assert told in done.stderr


def test_a_dry_run_of_a_list(cli: Cli, listed: Path, tmp_path: Path) -> None:
    done = cli("build-pairs", listed, "--dry-run")
    assert done.returncode == 1
    assert [line.split(" (")[0] for line in done.stdout.splitlines()] == [
        "small_to_small_top4.safetensors",
        "to bytes.safetensors",
    ]
    assert "error: line 6: no such file or folder: none.model" in done.stderr.splitlines()
    assert os.listdir(tmp_path) == ["pairs.txt"]
    listed.write_text("bytes bytes one.bin\n")
    done = cli("build-pairs", listed, "--dry-run")
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: line 1: the output one.bin does not end in .safetensors or .pt" in done.stderr


@pytest.mark.parametrize("top_k", [2, 4, 16])
def test_a_plan_is_an_upper_bound(
    byte_level: Tokenizer, sentencepiece: Tokenizer, tmp_path: Path, top_k: int
) -> None:
    for student, teacher in ((byte_level, sentencepiece), (sentencepiece, byte_level)):
        config = BuildConfig(top_k=top_k)
        planned = plan(student, teacher, config)
        projection = xtok.build(student, teacher, config)
        projection.save(tmp_path / "map.safetensors")
        assert projection.shape == (planned.rows, planned.columns)
        assert (
            int(((projection.row_kind == 1) | (projection.row_kind == 3)).sum())
            == planned.single_entry
        )
        assert projection.nnz <= planned.max_entries
        assert (tmp_path / "map.safetensors").stat().st_size <= planned.max_bytes


def test_options_that_do_not_go_together(cli: Cli, small: Path, listed: Path) -> None:
    for arguments in (
        [],
        ["--student-model", "bytes"],
        ["bytes"],
        ["bytes", "bytes", "--student-model", "bytes"],
    ):
        assert cli("build", *arguments).returncode == 2
    for arguments in (
        [],
        [str(listed), *pair(small)],
        [str(listed), "--output", "a.safetensors"],
        [str(listed), "--text", "a.txt"],
        [str(listed), "--teacher-revision", "v2"],
    ):
        assert cli("build-pairs", *arguments).returncode == 2


# The job script


def run_script(
    *arguments: str | Path, folder: Path, **env: str
) -> subprocess.CompletedProcess[str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "examples" / "slurm_build_pairs.sh"), *map(str, arguments)],
        cwd=folder,
        env={**plain, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_task_of_the_job_builds_its_pair(listed: Path, tmp_path: Path) -> None:
    done = run_script(listed, "maps", folder=tmp_path, SLURM_ARRAY_TASK_ID="2")
    assert (done.returncode, done.stdout) == (0, "maps/to bytes.safetensors\n")
    built = tmp_path / "maps" / "to bytes.safetensors"
    before = built.stat().st_mtime_ns
    again = run_script(listed, "maps", folder=tmp_path, SLURM_ARRAY_TASK_ID="2")
    assert again.returncode == 0
    assert "exists, and is kept" in again.stderr
    assert built.stat().st_mtime_ns == before
    anew = run_script(
        listed, "maps", "--quiet", folder=tmp_path, SLURM_ARRAY_TASK_ID="2", OVERWRITE="1"
    )
    assert (anew.returncode, anew.stderr) == (0, "")
    assert built.stat().st_mtime_ns > before


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("3", "no such file or folder: none.model"),
        ("4", "has no pair number 4"),
        ("0", "this is no task of an array"),
        ("", "this is no task of an array"),
    ],
)
def test_a_task_that_has_no_pair(listed: Path, tmp_path: Path, task: str, message: str) -> None:
    done = run_script(listed, "maps", folder=tmp_path, SLURM_ARRAY_TASK_ID=task)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.splitlines()[-1].startswith("hint: ")


def test_the_script_says_what_it_needs(tmp_path: Path) -> None:
    done = run_script(folder=tmp_path)
    fails(done, "the list of pairs or the folder is missing", "sbatch --array=1-N")
    done = run_script("none.txt", "maps", folder=tmp_path, SLURM_ARRAY_TASK_ID="1")
    fails(done, "the list of pairs none.txt cannot be read", "a text file")
