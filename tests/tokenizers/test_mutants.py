"""Damaged tokenizer files load or raise an error of one line; they never hang."""

from __future__ import annotations

import json
import os
import random
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from checks import mutant, within
from make_tokenizers import tekken_file

from xtok.errors import TokenizerError
from xtok.tokenizers import load_tokenizer

TEXT = "The ship's café, 201 steps.\n\n  x = [1, 2]"


def try_out(model: Path | str) -> bool:
    """Return whether a tokenizer loads and can be used; an error has one line."""
    texts = [TEXT.encode(), b"\xff\x00", b" "]
    try:
        tokenizer = load_tokenizer(model)
        spelled = tokenizer.segment_batch(texts)
        tokenizer.library_ids([TEXT])
        tokenizer.encode(TEXT)
        _ = tokenizer.chat_templates
    except TokenizerError as error:
        if "\n" in error.message:
            raise
        return False
    for text, ids in zip(texts, spelled, strict=True):
        assert ids is None or b"".join(tokenizer.table[token] for token in ids) == text
    return True


def check_mutants(path: Path, model: Path | str, count: int, seed: int) -> None:
    """Load mutants of a file, each in at most ten seconds. Some load, and some raise an error."""
    chance, data = random.Random(seed), path.read_bytes()
    assert try_out(model)
    outcomes = set()
    for number in range(count):
        path.write_bytes(mutant(data, chance))
        try:
            with within(10):
                outcomes.add(try_out(model))
        except BaseException as error:
            raise AssertionError(f"mutant {number} of {path.name}: {error!r}") from error
    assert outcomes == {True, False}


PLAIN = '{"tokenizer_class": "PreTrainedTokenizerFast"}'  # read without Transformers
FILES: dict[str, tuple[str, str, int]] = {  # source of a file, and the model name that loads it
    "a.model": ("small.model", "", 300),
    "a.tiktoken": ("small.tiktoken", r"@\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+", 200),
    "tekken.json": ("", "", 200),
    "tokenizer.json": ("small-byte-level/tokenizer.json", "", 200),
}


@pytest.mark.parametrize("name", FILES)
def test_mutants_of_a_file_load_or_are_rejected(name: str, small: Path, tmp_path: Path) -> None:
    source, more, count = FILES[name]
    path = tmp_path / name
    if source:
        path.write_bytes((small / source).read_bytes())
    else:
        tekken_file(path, small)
    model: Path | str = f"{path}{more}"
    if name == "tokenizer.json":
        (tmp_path / "tokenizer_config.json").write_text(PLAIN)
        model = tmp_path
    check_mutants(path, model, count, seed=2 + [*FILES].index(name))


# Faults that random mutations rarely produce


def changed_json(folder: Path, small: Path, last: int | None = None, **changed: Any) -> Path:
    """Write a tokenizer.json with other parts, or another id of the model's last token."""
    document = json.loads((small / "small-byte-level" / "tokenizer.json").read_text())
    if last is not None:
        document["model"]["vocab"][list(document["model"]["vocab"])[-1]] = last
    (folder / "tokenizer.json").write_text(json.dumps({**document, **changed}))
    return folder


TENFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    ("normalizer", "message"),
    [
        ({"type": "Precompiled", "precompiled_charsmap": "QUJDREVGRw=="}, ": Precompiled"),
        (
            {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": "x"},
            "retry-limit-in-match",
        ),
        ({"type": "Sequence", "normalizers": [TENFOLD] * 9}, "1000000000 times"),
    ],
)
def test_a_tokenizer_json_that_costs_too_much(
    small: Path, tmp_path: Path, normalizer: dict[str, Any], message: str, plain: bool
) -> None:
    folder = changed_json(tmp_path, small, normalizer=normalizer)
    if plain:
        (folder / "tokenizer_config.json").write_text(PLAIN)
    with within(20), pytest.raises(TokenizerError, match=re.escape(message)):
        load_tokenizer(folder).library_ids(["a" * 100_000])


def test_a_vocabulary_far_wider_than_its_tokens(small: Path, tmp_path: Path) -> None:
    """Such a vocabulary is rejected unless its width is given."""
    folder = changed_json(tmp_path, small, last=2_000_000)
    with pytest.raises(TokenizerError, match=r"1200 tokens, .* 2000001"):
        load_tokenizer(folder)
    assert load_tokenizer(folder, vocab_size=2_000_001).vocabulary.vocab_size == 2_000_001


@pytest.mark.skipif(
    version("tokenizers").startswith("0.22."), reason="tokenizers 0.22 takes memory for each id"
)
def test_a_token_id_beyond_all_limits(small: Path, tmp_path: Path) -> None:
    folder = changed_json(tmp_path, small, last=2**31)
    with within(20), pytest.raises(TokenizerError, match="2147483649"):
        load_tokenizer(folder)


@pytest.mark.parametrize("kind", ["scores", "pieces", "ids", "charsmap", "empty"])
def test_a_sentencepiece_model_with_odd_values(small: Path, tmp_path: Path, kind: str) -> None:
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString((small / "small.model").read_bytes())
    if kind == "scores":
        for piece in model.pieces[300:400]:
            piece.score = float("nan")
    elif kind == "pieces":
        model.pieces[400].piece = model.pieces[300].piece
        model.pieces[401].piece = ""
        model.pieces[10].piece = "<0x0G>"
    elif kind == "ids":
        model.trainer_spec.bos_id = model.trainer_spec.unk_id = 2**31 - 1
    elif kind == "charsmap":
        model.normalizer_spec.precompiled_charsmap = bytes(range(256))
    else:
        del model.pieces[:]
    path = tmp_path / "a.model"
    path.write_bytes(model.SerializeToString())
    with within(20):
        assert try_out(path) == (kind in ("scores", "ids"))


def test_endless_files_are_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        for prefix in ("", "tekken:", "spm:"):
            with within(5), pytest.raises(TokenizerError):
                load_tokenizer(f"{prefix}{path}")
