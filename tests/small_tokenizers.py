"""Build small tokenizers of every kind from small_corpus/, deterministically.

The tests use these tokenizers instead of real ones, and so does the quick start without a network.
Each function writes one tokenizer and returns its path.

    python tests/small_tokenizers.py --output-dir data/tokenizers/small
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import shutil
import tempfile
from pathlib import Path

import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

_TEXTS = Path(__file__).with_name("small_corpus")
_KINDS = ("english", "german", "french", "russian", "chinese", "japanese", "python", "emoji")
CORPUS = tuple((_TEXTS / f"{kind}.txt").read_bytes().decode() for kind in _KINDS)
"""The training text: one document of each kind, about 8 kB in all."""

ENGLISH = CORPUS[0]

SPECIAL_TOKENS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
)  # fmt: skip
"""The special tokens of a byte-level tokenizer; they follow the trained vocabulary."""

THINK = "<think>"
"""An added token that is not special: ordinary text in one token."""

CONTROL_SYMBOLS = ("[INST]", "[/INST]")
"""The control symbols of a SentencePiece model, beside `<s>` and `</s>`."""

TIKTOKEN_DIGITS = 3


def split_pattern(digits: int) -> str:
    """Return the pattern of cl100k and Llama 3, with groups of 1 to `digits` digits."""
    numeral = r"\p{N}" if digits == 1 else rf"\p{{N}}{{1,{digits}}}"
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numeral
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def byte_level_bpe(
    folder: Path, *, vocab_size: int, digits: int, normalizer: str | None = None
) -> Path:
    """Write a Hugging Face folder with a byte-level BPE tokenizer, like Llama 3's and Qwen's.

    The last ids are the special tokens, then `<think>`. Encoding a text prepends
    `<|begin_of_text|>` unless `add_special_tokens=False`. `config.json` gives the model a width
    larger than the tokenizer, `generation_config.json` two end-of-sequence ids.

    Args:
        folder: the folder, created if it is missing.
        vocab_size: number of tokens, including added tokens.
        digits: maximum number of digits in a token.
        normalizer: a Unicode normalization form: "NFC", "NFKC", ...
    """
    trained = _train_bpe(vocab_size - len(SPECIAL_TOKENS) - 1, digits, normalizer)
    trained.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    )
    trained.add_tokens([AddedToken(THINK, normalized=False, special=False)])
    ids = trained.get_vocab()
    bos, eos, _, turn_end, pad = SPECIAL_TOKENS
    _write_hf_folder(
        folder,
        trained,
        special_tokens={"bos_token": bos, "eos_token": eos, "pad_token": pad},
        eos_ids=[ids[eos], ids[turn_end]],
    )
    return folder


def sentencepiece_bpe(path: Path, *, vocab_size: int) -> Path:
    """Write a SentencePiece BPE model with byte fallback, like Llama 2's and Mistral's.

    It adds a dummy prefix, changes nothing else in the text, and splits digits. Its ids:
    `<unk> <s> </s>`, `CONTROL_SYMBOLS`, the user-defined `<think>`, the 256 bytes, the pieces.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        # An iterator and a buffer: the trainer writes file names into the model.
        sentence_iterator=iter("".join(CORPUS).splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=0.98,  # leaves rare characters to the byte fallback
        byte_fallback=True,
        split_digits=True,
        control_symbols=list(CONTROL_SYMBOLS),
        user_defined_symbols=[THINK],
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        minloglevel=2,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())
    return path


def sentencepiece_hf(folder: Path, model_path: Path) -> Path:
    """Write a Hugging Face folder with the same tokenizer as a SentencePiece file.

    Transformers converts the file, as it does for Llama 2. The folder has no file of another
    tokenizer format. Both tokenizers encode alike, except that this one also adds a dummy prefix
    after an added token.
    """
    from transformers import LlamaTokenizerFast

    with tempfile.TemporaryDirectory() as scratch:
        shutil.copyfile(model_path, Path(scratch) / "tokenizer.model")
        tokenizer = LlamaTokenizerFast.from_pretrained(scratch, legacy=False).backend_tokenizer
    # Llama 2's own normalizer. Metaspace, which replaces it in newer conversions, adds no dummy
    # prefix to a text that starts with a space; SentencePiece does.
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = None
    _write_hf_folder(
        folder,
        tokenizer,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        eos_ids=[tokenizer.token_to_id("</s>")],
    )
    return folder


def tiktoken_ranks(path: Path, *, vocab_size: int) -> Path:
    """Write a tiktoken file: a line `base64(bytes) rank` for each of the 256 bytes and the merges.

    The file has neither special tokens nor the pattern, which is `tiktoken_pattern()`.
    """
    vocab = _train_bpe(vocab_size, TIKTOKEN_DIGITS).get_vocab()
    byte_of = {char: byte for byte, char in enumerate(_byte_characters())}
    lines = [
        f"{base64.b64encode(bytes(byte_of[char] for char in token)).decode()} {rank}\n"
        for token, rank in sorted(vocab.items(), key=lambda item: item[1])
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="ascii", newline="\n")
    return path


def tiktoken_pattern() -> str:
    """Return the split pattern of `tiktoken_ranks`."""
    return split_pattern(TIKTOKEN_DIGITS)


def write_all(output_dir: Path) -> list[Path]:
    """Write one tokenizer of each kind, under fixed names."""
    model = sentencepiece_bpe(output_dir / "small.model", vocab_size=1000)
    return [
        byte_level_bpe(output_dir / "small-byte-level", vocab_size=1200, digits=1),
        byte_level_bpe(output_dir / "small-digits", vocab_size=800, digits=3),
        model,
        sentencepiece_hf(output_dir / "small-hf", model),
        tiktoken_ranks(output_dir / "small.tiktoken", vocab_size=1000),
    ]


def _train_bpe(vocab_size: int, digits: int, normalizer: str | None = None) -> Tokenizer:
    """Train a byte-level BPE tokenizer without added tokens. Its first ids are the 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = getattr(normalizers, normalizer)()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split_pattern(digits)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the corpus contains only {tokenizer.get_vocab_size()} tokens, expected {vocab_size}"
        )
    return tokenizer


def _write_hf_folder(
    folder: Path, tokenizer: Tokenizer, *, special_tokens: dict[str, str], eos_ids: list[int]
) -> None:
    """Write tokenizer.json and the three other small files of a model's folder."""
    bos = special_tokens["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B:1",
        special_tokens=[(bos, tokenizer.get_vocab()[bos])],
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    width = (tokenizer.get_vocab_size() // 128 + 1) * 128
    for name, value in {
        # The plain class loads tokenizer.json unchanged; LlamaTokenizer would rebuild it.
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens},
        "config": {"model_type": "llama", "vocab_size": width},
        "generation_config": {"eos_token_id": eos_ids},
    }.items():
        text = json.dumps(value, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8", newline="\n")


def _byte_characters() -> list[str]:
    """Return the display character of each byte, as GPT-2's `bytes_to_unicode`."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]


def main() -> None:
    """Write one tokenizer of each kind and print their paths."""
    default = Path(__file__).resolve().parents[1] / "data" / "tokenizers" / "small"
    parser = argparse.ArgumentParser(description="Build small tokenizers of every kind.")
    parser.add_argument("--output-dir", type=Path, default=default, help="default: %(default)s")
    for path in write_all(parser.parse_args().output_dir):
        print(os.path.relpath(path))


if __name__ == "__main__":
    main()
