"""Stdout contains only the result: no output of libraries, and no control bytes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
from checks import is_printable, works
from command_lines import EXAMPLE_ARGUMENTS, RUN_FIRST, TEACHER
from conftest import Cli
from forked import Forks
from make_tokenizers import copy_folder
from safetensors.numpy import save_file

# The commands run in forks of a process that has imported their libraries. The tests capture the
# output that libraries write directly to the file descriptors.
RUN_ALL = """
import json, os, sys
from xtok.__main__ import program
for name, args in json.loads(sys.argv[1]):
    if not os.fork():
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}.{kind}", os.O_CREAT | os.O_WRONLY), number)
        sys.argv = ["xtok", name, *args]
        try:
            program()
        except SystemExit as end:  # without the seconds that a fork takes to tear Torch down
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code or 0)
    print(name, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def talking(folder: Path, small: Path) -> Path:
    """A model folder that makes Rust print and Transformers warn, both with escape sequences."""
    config = {"model_type": "evil\x1b[2J", "vocab_size": 1300}
    copy_folder(small / "small-byte-level", folder, config=config)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["added_tokens"][0]["evil\x1b[31m\u009b"] = True
    (folder / "tokenizer.json").write_text(json.dumps(document))
    rows = np.random.default_rng(0).normal(size=(1300, 8)).astype(np.float32)
    save_file({"model.embed_tokens.weight": rows}, folder / "model.safetensors")
    return folder


def test_no_library_writes_on_the_stdout_of_any_command(
    small: Path, tmp_path: Path, forks: Forks
) -> None:
    for name in ("small.model", "model"):
        talking(tmp_path / name, small)
    (tmp_path / "text.txt").write_text("In 2012 there were 201 of them.\n" * 20)
    chat = [{"role": "user", "content": "How many?\x1b[31m\u202e"}]
    (tmp_path / "chat.json").write_text(json.dumps(chat))
    (tmp_path / "teacher.jsonl").write_text(TEACHER)
    work = {
        name: [*["--json"] * (name != "render"), *args] for name, args in EXAMPLE_ARGUMENTS.items()
    }
    del work["serve"]  # the tests of serve check its stdout
    work["vocab"] = ["--json", "small.model", "-t", "bytes"]  # the output is a file or JSON
    work["render"] = ["chat.json", "-m", "small.model", "--chat-template", "plain"]
    order = [*RUN_FIRST, *(work.keys() - set(RUN_FIRST))]
    result = subprocess.run(
        [forks.folder / "python", "-c", RUN_ALL, json.dumps([[n, work[n]] for n in order])],
        cwd=tmp_path, env=forks.env, capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    stdouts, stderrs = (
        {name: (tmp_path / f"{name}.{kind}").read_text(encoding="utf-8") for name in work}
        for kind in ("out", "err")
    )
    codes = dict(line.split() for line in result.stdout.splitlines())
    assert codes == dict.fromkeys(order, "0") | {"doctor": codes["doctor"]}
    for name in order:
        assert "evil" not in stdouts[name], name
        assert is_printable(stdouts[name] + stderrs[name]), name
        if name == "report":  # the JSON goes to a file beside the page
            continue
        data = json.loads(stdouts[name])
        if "-o" in work[name]:
            paths = data.get("paths") or [data.get("folder", data.get("output"))]
            assert paths == [work[name][-1]], name
    assert "a library printed: Ignored unknown kwarg option evil\\x1b[31m" in stderrs["build"]
    assert not [name for name in order if "model of type" in stderrs[name]]


def test_code_of_a_folder_may_print(cli: Cli, small: Path, tmp_path: Path) -> None:
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    own = copy_folder(small / "small-byte-level", tmp_path / "own", tokenizer_config=config)
    (own / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "print('Welcome!\\x1b[31m\\n' * 50)\n"
        "class Own(PreTrainedTokenizerFast): pass\n"
    )
    line = "build own bytes --trust-remote-code -o map.safetensors"
    result = works(cli(*line.split(), env={"HF_HOME": str(tmp_path / "hf")}))
    assert result.stdout == "map.safetensors\n"
    assert result.stderr.count("Welcome!\\x1b[31m\n") == 20
    assert is_printable(result.stderr)


def test_paths_are_printed_byte_for_byte(small: Path, tmp_path: Path, forks: Forks) -> None:
    model = bytes(small / "small.model")
    command = [bytes(forks.folder / "xtok"), b"build", model, b"bytes", b"-q", b"-o"]
    for name in (b"\xff.safetensors", b"a\x1b[31m\n.safetensors"):
        result = subprocess.run(
            [*command, name], cwd=tmp_path, env=forks.env, stdout=subprocess.PIPE, check=True
        )
        assert result.stdout == name + b"\n"


def test_json_is_safe_on_a_terminal(cli: Cli, small: Path, tmp_path: Path) -> None:
    model = tmp_path / "a\u009b\x7f\u202e\u2028.model"
    shutil.copy(small / "small.model", model)
    works(cli("build", model, "bytes", "-o", "map.safetensors", "-q"))
    output = cli("inspect", "map.safetensors", "--json").stdout
    assert is_printable(output)
    assert model.name in json.loads(output)["student"]["model_id"]
