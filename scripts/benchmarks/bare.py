"""Minimal programs for the tasks of xtok's commands.

Each library is used in its fastest way: for short texts, tiktoken's single call is faster than its
batch call. A folder is loaded with AutoTokenizer, as in a trainer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def library(path: str, pattern: str) -> tuple[list[str], Callable[[list[str]], Any]]:
    """Return a file's tokens as text, and the library's fastest call to encode many texts."""
    if path.endswith(".model"):
        from sentencepiece import SentencePieceProcessor

        model = SentencePieceProcessor(model_file=path)
        return [model.id_to_piece(i).replace("▁", " ") for i in range(len(model))], model.encode
    if path.endswith(".tiktoken"):
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe

        ranks = load_tiktoken_bpe(path)
        encoding = tiktoken.Encoding(
            path, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )
        plain = encoding.encode_ordinary
        return [t.decode("utf-8", "replace") for t in ranks], lambda texts: [*map(plain, texts)]
    from transformers import AutoTokenizer

    rust = AutoTokenizer.from_pretrained(path).backend_tokenizer
    encode = rust.encode_batch_fast
    tokens = [rust.decoder.decode([display]) for display in rust.get_vocab()]
    return tokens, lambda texts: [e.ids for e in encode(texts, add_special_tokens=False)]


def build(student: str, teacher: str, *patterns: str) -> None:
    """Encode each vocabulary once in the other's."""
    sides = zip((student, teacher), patterns or ("", ""), strict=True)
    (ours, by_student), (theirs, by_teacher) = (library(*side) for side in sides)
    by_teacher(ours)
    by_student(theirs)


def encode(texts: str, student: str, teacher: str, *patterns: str) -> None:
    """Encode the texts of a file of JSON lines with both libraries."""
    import json

    with open(texts, encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for line in lines]
    for path, pattern in zip((student, teacher), patterns, strict=True):
        library(path, pattern)[1](documents)


def kernel() -> None:
    """Compile a kernel of one loop."""
    import numba
    import numpy as np

    @numba.njit  # type: ignore[untyped-decorator, unused-ignore]
    def total(values):  # type: ignore[no-untyped-def]
        found = 0
        for value in values:
            found += value
        return found

    total(np.arange(4))


def read(path: str, copy: str = "") -> None:
    """Read a safetensors file, and optionally write it to `copy`."""
    from safetensors.numpy import load_file, save_file

    arrays = load_file(path)
    if copy:
        save_file(arrays, copy)


def imports(*names: str) -> None:
    """Import modules."""
    from importlib import import_module

    for name in names:
        import_module(name)


def load(*models: str) -> None:
    """Load tokenizers as every command of xtok does."""
    from xtok import load_tokenizer

    for model in models:
        load_tokenizer(model)


def save(model: str, tokenizer: str, folder: str) -> None:
    """Load a model and a tokenizer with Transformers, and save both."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    programs = (build, encode, imports, kernel, load, read, save)
    {f.__name__: f for f in programs}[sys.argv[1]](*sys.argv[2:])
