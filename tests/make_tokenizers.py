"""Tokenizers of tests, and changed copies of their files."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer, sentencepiece_model_pb2
from small_tokenizers import CORPUS
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, normalizers, pre_tokenizers

from xtok.tokenizers import Tokenizer, load_tokenizer
from xtok.tokenizers.table import TokenTable


def byte_ranks(
    path: Path, *tokens: str | bytes, width: int | None = None, digits: int = 3
) -> Tokenizer:
    """Return a tokenizer of the 256 bytes (id = byte) and more tokens (256, 257, …)."""
    every = [bytes([b]) for b in range(256)]
    every += [t.encode() if isinstance(t, str) else t for t in tokens]
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(every)))
    pattern = rf"\p{{N}}{{1,{digits}}}| ?\p{{L}}+|\s+"
    return load_tokenizer(f"{path}@{pattern}", vocab_size=width)


def converted_ranks(ranks: Path, pattern: str) -> Rust:
    """Convert a rank file with Transformers; the result merges tokens like the rank file."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    # Positional, because the name of the last argument depends on the version of Transformers.
    converter = TikTokenConverter(str(ranks), pattern, False, [])  # type: ignore[no-untyped-call]
    rust: Rust = converter.converted()
    rust.model.ignore_merges = False
    return rust


def hf_folder_of_ranks(ranks: Path, pattern: str, folder: Path, normalizer: str | None) -> Path:
    rust = converted_ranks(ranks, pattern)
    if normalizer is not None:
        rust.normalizer = getattr(normalizers, normalizer)()
    return saved(folder, rust)


def tekken_file(path: Path, small: Path, **changed: Any) -> Path:
    """Write the small rank file in Mistral's format, with 30 special tokens before it.

    In the config, single values are changed; other parts are replaced as a whole.
    """
    lines = (small / "small.tiktoken").read_text().split("\n")[:-1]
    vocab = [
        {"rank": int(rank), "token_bytes": token, "token_str": None}
        for token, rank in (line.split() for line in lines)
    ]
    config = {
        "pattern": r"\p{N}{1,3}|[^\p{N}]+", "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(vocab) - 100 + 30, "default_num_special_tokens": 30,
        "version": "v3", **changed.pop("config", {}),
    }  # fmt: skip
    path.write_text(json.dumps({"config": config, "vocab": vocab, **changed}))
    return path


def unigram_model(**options: Any) -> bytes:
    """Train a small Unigram model of SentencePiece."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter("".join(CORPUS).splitlines()), model_writer=model,
        model_type="unigram", vocab_size=600, num_threads=1, minloglevel=2, **options,
    )  # fmt: skip
    return model.getvalue()


def sentencepiece_with(source: Path, path: Path, change: Callable[[Any], object]) -> Path:
    """Write a SentencePiece file after a change of its model."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(source.read_bytes())
    change(proto)
    path.write_bytes(proto.SerializeToString())
    return path


def saved(folder: Path, rust: Rust, **roles: str) -> Path:
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=rust, **roles).save_pretrained(str(folder))
    return folder


def word_piece(folder: Path, *, lowercase: bool) -> Path:
    words = "[PAD] [UNK] [CLS] [SEP] the cat ##s ##ing run t h e a ##t ##h ##e ##a , . é É THE"
    rust = Rust(models.WordPiece({w: i for i, w in enumerate(words.split())}, unk_token="[UNK]"))
    rust.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    roles = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return saved(folder, rust, unk_token="[UNK]", **roles)


def copy_folder(source: Path, folder: Path, **parts: dict[str, Any] | None) -> Path:
    """Copy a model's folder; replace parts of JSON files by file stem, or omit files."""
    shutil.copytree(source, folder)
    for stem, changed in parts.items():
        path = folder / f"{stem}.json"
        if changed is None:
            path.unlink()
        else:
            path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    return folder


def qwen_like(small: Path, folder: Path, normalizer: str) -> Path:
    """Copy the small byte-level folder with a normalizer; `<think>` is matched before it runs."""
    parts = {"normalizer": {"type": normalizer}}
    return copy_folder(small / "small-byte-level", folder, tokenizer=parts)


def table_of(tokenizer: Tokenizer) -> TokenTable:
    assert tokenizer.vocabulary.table is not None
    return tokenizer.vocabulary.table


def spelled(tokenizer: Tokenizer, data: bytes) -> list[bytes]:
    return [table_of(tokenizer)[i] for i in tokenizer.segment(data)]


def token(tokenizer: Tokenizer, data: bytes) -> int:
    [token_id] = tokenizer.segment(data)
    return token_id
