"""The roles that a library declares take precedence over names."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_folders import NAMES
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

import xtok
from xtok.tokenizers import Tokenizer, library_differences, load_tokenizer
from xtok.tokenizers.pairs import Pair
from xtok.training.collator import DistillationCollator

TEXT = "two boats"
# Special tokens, added text tokens, the roles of tokenizer_config.json, and the eos tokens of the
# generation config; as the folders on the hub have them.
Layout = tuple[str, str, dict[str, str | None], str]
LAYOUTS: dict[str, Layout] = {
    "mistral": ("<unk> <s> </s> [INST] [/INST]", "",
                {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": None}, ""),
    "gemma-1": ("<pad> <eos> <bos> <unk> <start_of_turn> <end_of_turn>", "<mask> <s> </s> <b>",
                {"unk": "<unk>", "bos": "<bos>", "eos": "<eos>", "pad": "<pad>"}, ""),
    "gemma-3": ("<pad> <eos> <bos> <unk> <start_of_turn> <end_of_turn>", "<s> </s>",
                {"unk": "<unk>", "bos": "<bos>", "eos": "<eos>", "pad": "<pad>"},
                "<eos> <end_of_turn>"),
    "yi": ("<unk> <s> <|startoftext|> </s> <|endoftext|> <|im_start|> <|im_end|>", "",
           {"unk": "<unk>", "bos": "<|startoftext|>", "eos": "<|im_end|>", "pad": "<unk>"}, ""),
    "smollm3": ("<|begin_of_text|> <|end_of_text|> <|im_start|> <|im_end|>", "<think> </think>",
                {"bos": None, "eos": "<|im_end|>", "pad": "<|im_end|>"}, "<|im_end|>"),
    "phi-3": ("<unk> <s> <|endoftext|> <|assistant|> <|end|> <|user|>", "</s>",
              {"unk": "<unk>", "bos": "<s>", "eos": "<|endoftext|>", "pad": "<|endoftext|>"},
              "<|endoftext|> <|assistant|> <|end|>"),
    "gpt-2": ("<|endoftext|>", "", dict.fromkeys(("unk", "bos", "eos"), "<|endoftext|>"), ""),
}  # fmt: skip
SMALL = (*LAYOUTS, "small-byte-level", "small-digits", "small-hf", "small.model")
FETCHED = (
    *("claude-2", "deepseek-v3", "mistral-v1.model", "mistral-v3.model", "tekken.json"),
    *("qwen.tiktoken", "llama3.tiktoken", "llama4.tiktoken", "cl100k.tiktoken", "o200k.tiktoken"),
)


def write_layout(folder: Path, trained: Path, layout: Layout) -> None:
    """Write a folder with the vocabulary of another, and with these added tokens."""
    special, text, roles, eos = layout
    document = json.loads((trained / "tokenizer.json").read_text())
    document["added_tokens"], document["post_processor"] = [], None
    rust = RustTokenizer.from_str(json.dumps(document))
    rust.add_special_tokens([AddedToken(t, normalized=False) for t in special.split()])
    rust.add_tokens([AddedToken(t, normalized=False, special=False) for t in text.split()])
    folder.mkdir()
    rust.save(str(folder / "tokenizer.json"))
    files: dict[str, Any] = {
        "tokenizer_config.json": {f"{role}_token": name for role, name in roles.items()},
        "generation_config.json": {"eos_token_id": [*map(rust.token_to_id, eos.split())]},
        "config.json": {"model_type": "llama", "vocab_size": rust.get_vocab_size()},
    }
    files["tokenizer_config.json"]["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))


@pytest.fixture(scope="module")
def all_small(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("layouts")
    for name, layout in LAYOUTS.items():
        write_layout(folder / name, small / "small-digits", layout)
    return {n: load_tokenizer((folder if n in LAYOUTS else small) / n) for n in SMALL}


def library_id(tokenizer: Tokenizer, role: str) -> int | None:
    """Return the library's id for a role."""
    if tokenizer.library is not None:
        i: int | None = getattr(tokenizer.library, f"{role}_token_id")
        return i
    return next(iter(tokenizer.declared.get(role, ())), None)


@pytest.mark.parametrize("name", SMALL)
def test_roles_of_small_tokenizers(all_small: dict[str, Tokenizer], name: str) -> None:
    _check_roles(all_small[name])


@pytest.mark.real
@pytest.mark.parametrize("name", FETCHED)
def test_roles_of_real_tokenizers(load_real: Callable[[str], Tokenizer], name: str) -> None:
    """`test_hf_folder.py` contains these folders."""
    _check_roles(load_real(name))


def _check_roles(tokenizer: Tokenizer) -> None:
    table = tokenizer.table
    for role in ("bos", "eos", "pad", "unk"):
        ids = table.roles.get(role, ())
        if (i := library_id(tokenizer, role)) is not None:
            assert ids[0] == i
        elif role != "unk" and tokenizer.library is not None:
            assert {tokenizer.declared["eos"].get(i) for i in ids} <= {"generation_config.json"}
    assert {i for ids in table.roles.values() for i in ids} <= table.control_names.keys()
    assert library_differences(tokenizer, [TEXT]) == []


def test_pairs_of_small_tokenizers(all_small: dict[str, Tokenizer]) -> None:
    for student, teacher in itertools.product(all_small.values(), repeat=2):
        pair = xtok.load_pair(student, teacher)
        _check_pair(pair)
        _check_chunks(pair)


@pytest.mark.real
def test_pairs_of_real_tokenizers(
    load_real: Callable[[str], Tokenizer], load_hub: Callable[[str], Tokenizer]
) -> None:
    fetched = [*map(load_real, FETCHED), *map(load_hub, NAMES)]
    for student, teacher in itertools.product(fetched, repeat=2):
        if student is not teacher:
            _check_pair(Pair(student.vocabulary, teacher.vocabulary, student, teacher))


def _check_pair(pair: Pair) -> None:
    """Roles pair with roles, and control tokens with control tokens."""
    rows, columns = pair.tables
    assert set(pair.equal_roles) <= rows.control_names.keys()
    assert {*pair.equal_roles.values()} <= columns.control_names.keys()
    if pair.is_same:
        return
    for role in ("bos", "eos", "pad"):
        ids, others = rows.roles.get(role, ()), columns.roles.get(role, ())
        ends = {*columns.roles.get("turn_end", ()), *columns.roles.get("eos", ())}
        for i in ids[:1]:
            counterpart = pair.equal_roles.get(i)
            if role == "eos" and others:
                assert counterpart in (ends if i in rows.roles.get("turn_end", ()) else others)
            elif rows.roles_by_id[i] == (role,):
                assert counterpart == next(iter(others), None)


def _check_chunks(pair: Pair) -> None:
    """A chunk contains the bos and eos of a text if both sides have them."""
    student, teacher = pair.tokenizers
    batch = DistillationCollator(student, teacher, eos=True)([TEXT])
    [side] = batch["teachers"]
    rows = batch["input_ids"][0], side["input_ids"][0]
    chunks = side["alignment"].student_chunk_id[0], side["alignment"].teacher_chunk_id[0]
    for index, role in ((0, "bos"), (-1, "eos")):
        ours, theirs = library_id(student, role), library_id(teacher, role)
        assert ours is None or rows[0][index] == ours
        assert theirs is None or rows[1][index] == theirs
        if ours is not None and theirs is not None:
            assert chunks[0][index] == chunks[1][index] >= 0


@pytest.mark.parametrize(("student", "teacher"), [("mistral", "gemma-1"), ("phi-3", "gemma-3")])
def test_tags_named_like_roles(all_small: dict[str, Tokenizer], student: str, teacher: str) -> None:
    """Gemma's <s> and </s> are HTML tags: no text of another side begins or ends with them."""
    pair = xtok.load_pair(all_small[student], all_small[teacher])
    (rows, columns), back = pair.tables, pair.reversed
    ids = [rows.roles["bos"][0], *pair.tokenizers[0].encode(TEXT).ids, rows.roles["eos"][0]]
    [read] = xtok.Retokenizer(pair)([ids])
    assert (read[0], read[-1]) == (columns.roles["bos"][0], columns.roles["eos"][0])
    assert xtok.Retokenizer(back)([read]) == [ids]
    inputs = torch.tensor([ids])
    collator = DistillationCollator(*pair.tokenizers)
    [side] = collator.from_student_ids(inputs, torch.ones_like(inputs), inputs)["teachers"]
    assert side["input_ids"].tolist() == [read]
    assert side["alignment"].student_chunk_id[0].tolist() == [*range(len(ids))]
    events = xtok.events(*pair.tokenizers)
    same_event = np.flatnonzero(events.student_event == events.student_event[ids[-1]])
    assert not rows.lengths[same_event].any()


def test_gpt_2s_only_token_begins_and_ends(all_small: dict[str, Tokenizer]) -> None:
    pair = xtok.load_pair(all_small["gpt-2"], all_small["mistral"])
    [end], columns = pair.tables[0].roles["eos"], pair.tables[1]
    [read] = xtok.Retokenizer(pair)([[end, 97, end]])
    assert (read[0], read[-1]) == (columns.roles["bos"][0], columns.roles["eos"][0])
    assert xtok.Retokenizer(pair).sequence([97], [end])[-1] == columns.roles["eos"][0]


@pytest.mark.parametrize("around", [("<|begin_of_text|>", "<|end_of_text|>"), ("", "")])
def test_a_text_has_one_bos_and_one_eos(byte_level: Tokenizer, around: tuple[str, str]) -> None:
    batch = DistillationCollator(byte_level, byte_level, eos=True)([TEXT.join(around)])
    ids = batch["input_ids"][0].tolist()
    bos, eos = (byte_level.table.roles[role][0] for role in ("bos", "eos"))
    assert ids == [bos, *byte_level.encode(TEXT).ids, eos]
