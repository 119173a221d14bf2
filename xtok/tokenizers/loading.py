"""Load tokenizers from a name, a path or a loaded object."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from xtok._lib.parsing import parse_json
from xtok.errors import TokenizerError
from xtok.tokenizers._backend import Backend, no_panic
from xtok.tokenizers._bytes import BytesBackend, NullBackend
from xtok.tokenizers._folder import NAMES, add_configs
from xtok.tokenizers._hf import HuggingFaceBackend
from xtok.tokenizers._sentencepiece import SentencePieceBackend
from xtok.tokenizers._tekken import is_megatron, is_tekken, load_megatron, load_tekken
from xtok.tokenizers._tiktoken import RankBackend, is_rank_file, load_ranks
from xtok.tokenizers._tokenizer import Tokenizer
from xtok.tokenizers.hf_folder import hint_without_fast, load_folder, load_json, runs_code
from xtok.tokenizers.hub import ModelFiles
from xtok.tokenizers.model_names import (
    FILE_KINDS,
    TOKENIZER_JSON,
    ModelName,
    is_path,
    not_found,
    parse_name,
)
from xtok.tokenizers.pairs import Pair

ModelLike: TypeAlias = str | PathLike[str] | Tokenizer
"""A model argument: a name or path for `load_tokenizer`, or a loaded tokenizer."""


# One class for each of `model_names.BUILT_IN`.
_BUILT_IN: dict[str, Callable[[str], Backend]] = {"bytes": BytesBackend, "null": NullBackend}


def load_tokenizer(
    model: Any,
    *,
    vocab_size: int | None = None,
    offline: bool = False,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """Load a tokenizer of any kind. The kind of the files determines the library.

    >>> xtok.load_tokenizer("bytes", vocab_size=300)
    Tokenizer('bytes', bytes, 300 ids)

    Args:
        model: a Hugging Face repo id, folder or `tokenizer.json`; a SentencePiece `.model`,
            tiktoken or `tekken.json` file; `bytes`; `null` or `null:SIZE`; or a loaded fast Hugging
            Face tokenizer. xtok detects the kind of a file from its contents, unless a prefix
            (`hf:`, `spm:`, `tiktoken:`, `tekken:`) sets the kind. `REPO@REVISION` pins a branch,
            tag or commit. `FILE@REGEX` sets the split pattern of a tiktoken file. A `Tokenizer` is
            returned unchanged.
        vocab_size: width of the model's logits. The default is the width in the model's config,
            otherwise the tokenizer's largest id + 1.
        offline: use only the local cache, like `HF_HUB_OFFLINE=1`.
        trust_remote_code: allow custom tokenizer code from the repo. The tokenizer's `notes` report
            that the code has run.

    Raises:
        TokenizerError: if the tokenizer is missing or unreadable, or its tokens have no exact
            bytes.
    """
    if isinstance(model, Tokenizer):
        vocabulary = model.vocabulary
        if vocab_size not in (None, vocabulary.vocab_size):
            raise TokenizerError(
                f"{vocabulary.model_id} is already loaded with {vocabulary.vocab_size} ids",
                hint="set the width when you load the tokenizer",
                parameter="vocab_size",
            )
        return model
    if not isinstance(model, str | PathLike):
        return from_transformers(model, vocab_size=vocab_size)
    name = parse_name(model)
    with no_panic(os.fspath(model)):
        backend, files, location = _load(name, offline, trust_remote_code)
        if name.suffix is not None and name.path.exists() and backend.name != "tiktoken":
            raise TokenizerError(
                f"{name.location} does not support @{name.suffix}",
                hint="use @ only for a repo's revision or the split pattern of a tiktoken file",
            )
        text = os.fspath(model)
        return Tokenizer(backend, name.model_id, files, location, text, vocab_size=vocab_size)


def _load(
    name: ModelName, offline: bool, trust_remote_code: bool
) -> tuple[Backend, ModelFiles | None, str | Path | None]:
    """Return the backend, the files of a folder or repo, and `Tokenizer.location`."""
    kind, location, suffix, path = name
    if kind in _BUILT_IN:
        return _BUILT_IN[kind](location), None, None
    if kind in FILE_KINDS or (kind is None and path.is_file() and not name.is_json):
        return _from_file(path, kind, suffix), None, path
    pattern: str | None = None
    if path.exists():
        files, pattern = ModelFiles(path.parent if name.is_json else path, offline=offline), suffix
    elif is_path(location, sure=kind == "hf"):
        raise not_found(location)
    else:
        files = ModelFiles(location, revision=suffix, offline=offline)
    if name.is_json and runs_code(files) and not trust_remote_code:
        return load_json(path), files, files.model
    return _from_folder(files, pattern, trust_remote_code), files, files.model


_CONFIG = "tokenizer_config.json"
_WORD_FILES = ("merges.txt", "vocab.txt")  # GPT-2 and BERT


def load_pair(
    student_model: ModelLike | Pair,
    teacher_model: ModelLike | None = None,
    *,
    offline: bool = False,
    trust_remote_code: bool = False,
) -> Pair:
    """Load the tokenizers of two models as a `Pair`, which caches all computed facts.

    >>> xtok.load_pair("bytes", "bytes").shape
    (256, 256)

    Args:
        student_model: the student (rows), in any form that `load_tokenizer` accepts. A pair is
            returned unchanged.
        teacher_model: the teacher (columns).
        offline: see `load_tokenizer`.
        trust_remote_code: see `load_tokenizer`.

    Raises:
        TokenizerError: for the same reasons as `load_tokenizer`.
        TypeError: if the arguments are neither two models nor a pair.
    """
    if isinstance(student_model, Pair) and teacher_model is None:
        return student_model
    if isinstance(student_model, Pair) or teacher_model is None:
        raise TypeError("pass two models (student first) or one pair; name all other arguments")
    options = {"offline": offline, "trust_remote_code": trust_remote_code}
    student = teacher = load_tokenizer(student_model, **options)
    if teacher_model != student_model:
        teacher = load_tokenizer(teacher_model, **options)
    return Pair(student.vocabulary, teacher.vocabulary, student, teacher)


def from_transformers(tokenizer: Any, *, vocab_size: int | None = None) -> Tokenizer:
    """Wrap a loaded fast Hugging Face tokenizer, which stays unchanged.

    Args:
        tokenizer: a `PreTrainedTokenizerFast`.
        vocab_size: width of the model's logits. The default is the width in the `config.json` of
            the tokenizer's folder, otherwise the largest id + 1.

    Raises:
        TokenizerError: if the tokenizer is slow, or its tokens have no exact bytes.
    """
    name = str(getattr(tokenizer, "name_or_path", "") or "tokenizer")
    if not getattr(tokenizer, "is_fast", False):
        raise TokenizerError(
            f"{name} has type {type(tokenizer).__name__}, expected a fast Hugging Face tokenizer",
            hint="use xtok.load_tokenizer, or AutoTokenizer with use_fast=True",
        )
    backend, path = HuggingFaceBackend(tokenizer, name), Path(name)
    return Tokenizer(backend, path.name or name, ModelFiles(path), vocab_size=vocab_size)


def _from_file(path: Path, kind: str | None, pattern: str | None) -> Backend:
    if not path.is_file():
        raise not_found(str(path))
    head = _head(path)
    of_contents = _kind(head)
    if kind is None and of_contents == "tekken" and not is_tekken(path):
        return load_json(path)
    if kind == "spm" or (kind is None and of_contents == "spm"):
        return SentencePieceBackend.from_file(path)
    return _ranks(path, kind or of_contents, head, pattern)


def _kind(head: bytes) -> str:
    """Detect the kind of a tokenizer file from its first 4 kB."""
    if head.lstrip().startswith(b"{"):
        return "tekken"
    return "tiktoken" if is_rank_file(head) or is_megatron(head) else "spm"


def _ranks(path: Path, kind: str, head: bytes, pattern: str | None) -> RankBackend:
    if kind == "tekken":
        return load_tekken(path)
    return (load_megatron if is_megatron(head) else load_ranks)(path, pattern)


def _from_folder(files: ModelFiles, pattern: str | None, trust_remote_code: bool) -> Backend:
    """Read tiktoken and tekken files directly, and other files like AutoTokenizer."""
    path = files.first((TOKENIZER_JSON, *NAMES, *_WORD_FILES))
    if path is None:
        raise _nothing_in(files)
    if path.name != TOKENIZER_JSON and not any(map(files.find, ("config.json", _CONFIG))):
        _check_without_config(path, files)
    is_loose = path.name not in (TOKENIZER_JSON, *_WORD_FILES)
    head = _head(path)
    kind = "tekken" if path.suffix == ".json" else _kind(head)
    if is_loose and kind != "spm":
        ranks = _ranks(path, kind, head, pattern)
        add_configs(ranks, files)
        ranks.other = "AutoTokenizer", partial(load_folder, files, path)
        return ranks
    read = load_folder(files, path, trust_remote_code=trust_remote_code)
    if path.name != TOKENIZER_JSON:
        _check_read(read, files)
    return read


def _nothing_in(files: ModelFiles) -> TokenizerError:
    if isinstance(files.model, Path) and files.model.is_file():
        _head(files.model)
    files.find(TOKENIZER_JSON, required=True)
    return TokenizerError(
        f"{files} has no fast tokenizer, because tokenizer.json is missing",
        hint=hint_without_fast(files)
        or "run AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER), or "
        "pass the path of the .model or .tiktoken file",
    )


def _check_read(backend: Backend, files: ModelFiles) -> None:
    """Check that AutoTokenizer used the vocabulary file of the folder."""
    path = files.first((*NAMES, "vocab.json", "vocab.txt"))
    if path is None:
        return
    listed = _displays(path)
    loaded = {entry.display for entry in backend.entries()}
    missing = [name for name in listed if name not in loaded]
    if 2 * len(missing) > len(listed):
        raise TokenizerError(
            f"AutoTokenizer does not read {path.name} in {files}: {len(missing):,} of its "
            f"{len(listed):,} tokens are missing",
            hint="set tokenizer_class in tokenizer_config.json"
            + f", or pass the path of the file: {path}" * (path.suffix == ".model"),
        )


def _displays(path: Path) -> list[bytes]:
    if path.suffix == ".json":
        return [name.encode() for name in parse_json(path.read_bytes())]
    if path.suffix == ".txt":
        return path.read_bytes().splitlines()
    return [entry.display for entry in SentencePieceBackend.from_file(path).entries()]


def _check_without_config(path: Path, files: ModelFiles) -> None:
    """Reject a folder if its tokenizer is ambiguous without a config."""
    if path.name in _WORD_FILES:
        raise TokenizerError(
            f"{files} has {path.name}, but no config.json that names the tokenizer's class",
            hint="download the model's config.json or tokenizer_config.json into the folder",
        )
    folder = files.model
    if not isinstance(folder, Path):
        return
    names = sorted({p.name for name in NAMES for p in folder.glob(name) if p.is_file()})
    if len(names) > 1:
        raise TokenizerError(
            f"{files} has several tokenizers, but no config.json: {', '.join(names)}",
            hint=f"pass the path of a single file, such as {path}",
        )


def _head(path: Path) -> bytes:
    """Return the first 4 kB of a file. Rejects empty files, Git LFS pointers and GGUF."""
    with path.open("rb") as file:
        head = file.read(4096)
    if not head:
        raise TokenizerError(f"{path} is empty", hint="download the file again")
    if head.startswith(b"version https://git-lfs"):
        raise TokenizerError(
            f"{path} is a Git LFS pointer instead of the file's contents",
            hint="run git lfs pull in the file's repository",
        )
    if head.startswith(b"GGUF"):
        raise TokenizerError(
            f"{path} is a .gguf file, which xtok does not support",
            hint="use the repo or folder of the original model",
        )
    return head
