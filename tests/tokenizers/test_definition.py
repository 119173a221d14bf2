"""The digest of a tokenizer's definition changes with every change that affects ids."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from make_maps import built
from make_tokenizers import copy_folder, sentencepiece_with, tekken_file, word_piece
from small_tokenizers import CORPUS

import xtok
from xtok.config import BuildConfig, ProjectConfig
from xtok.inspection.verify import verify
from xtok.maps.provenance import difference, make_recipe
from xtok.teachers.parts import parts_recipe
from xtok.tokenizers import Tokenizer, from_transformers, load_tokenizer

Document = dict[str, Any]
Change = Callable[[Any], object]
MARKED = [" <think> a<think>b <|im_end|> a<|im_end|>b <|im_start|>", "ﬁ cafe\u0301 ÀB  x1234 a\n"]
TEXTS = [*(text[:1500] for text in CORPUS), *MARKED, ""]
EVERY = 9  # the index of the merge to remove


def without(index: int) -> Change:
    return lambda document: document["model"]["merges"].pop(index)


def to(name: str, value: Any) -> Change:
    return lambda document: document.update({name: value})


def flag(name: str, token: str, value: bool) -> Change:
    def change(document: Document) -> None:
        [entry] = [t for t in document["added_tokens"] if t["content"] == token]
        entry[name] = value

    return change


def split(pattern: str, behavior: str) -> Change:
    def change(document: Document) -> None:
        before = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior}
        parts = [{**before, "invert": False}, document["pre_tokenizer"]]
        document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}

    return change


def byte_level(**options: bool) -> Change:
    def change(document: Document) -> None:
        for part in document["pre_tokenizer"]["pretokenizers"]:
            if part["type"] == "ByteLevel":
                part.update(options)

    return change


def swapped(index: int) -> Change:
    def change(document: Document) -> None:
        merges = document["model"]["merges"]
        merges[index], merges[index + 1] = merges[index + 1], merges[index]

    return change


def replaces(old: str, new: str) -> Change:
    return to("normalizer", {"type": "Replace", "pattern": {"String": old}, "content": new})


CHANGES: dict[str, Change] = {
    **{f"merge {index}": without(index) for index in range(0, 1000, EVERY)},
    **{f"merges {index} and the next": swapped(index) for index in range(0, 1000, 3 * EVERY)},
    **{
        f"{name} of {token}": flag(name, token, name != "normalized")
        for name in ("lstrip", "rstrip", "single_word")
        for token in ("<think>", "<|im_end|>")
    },
    "not special": flag("special", "<|im_start|>", False),
    **{form: to("normalizer", {"type": form}) for form in ("NFC", "NFD", "NFKC", "NFKD")},
    "Lowercase": to("normalizer", {"type": "Lowercase"}),
    "StripAccents": to("normalizer", {"type": "Sequence", "normalizers": [
        {"type": "NFD"}, {"type": "StripAccents"}]}),
    "Strip": to("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}),
    "Prepend": to("normalizer", {"type": "Prepend", "prepend": "x"}),
    **{f"{old!r} → {new!r}": replaces(old, new) for old, new in ("ab", "e ", ("\n", " "))},
    "words": split(r"\w+", "Isolated"),
    "digits": split(r"\d", "Isolated"),
    "spaces": split(" ", "Isolated"),
    "spaces removed": split(" ", "Removed"),
    "a space before": byte_level(add_prefix_space=True),
    "GPT-2's pattern": byte_level(use_regex=True),
    "no post-processor": to("post_processor", None),
}  # fmt: skip


def ids_of(tokenizer: Tokenizer) -> list[Any]:
    """Return all results of a tokenizer for texts."""
    whole, within = tokenizer.encode_batch(TEXTS), tokenizer.library_ids(TEXTS)
    types = tokenizer.table.types.tolist()
    return [whole, within, types, dict(tokenizer.table.roles), tokenizer.bos_id]


class Kept:
    def __init__(self, before: Tokenizer, other: Tokenizer) -> None:
        self.other, self.ids = other, ids_of(before)
        self.map = built(before, other)
        self.models = self.models_of(before)

    def models_of(self, tokenizer: Tokenizer) -> Any:
        pair = xtok.load_pair(self.other, tokenizer)
        return parts_recipe(pair, (), "", ProjectConfig())["models"]

    def differs(self, changed: Tokenizer) -> bool:
        """Return whether the tokenizer gives other ids; cached results are then invalid."""
        if ids_of(changed) == self.ids:
            return False
        recipe = make_recipe(BuildConfig())
        assert difference(self.map, xtok.load_pair(changed, self.other), recipe) is not None
        assert self.models_of(changed) != self.models
        return True


def test_every_change_of_a_tokenizer_json(
    small: Path, byte_level: Tokenizer, digits: Tokenizer, tmp_path: Path
) -> None:
    kept, folder = Kept(byte_level, digits), tmp_path / "small-byte-level"
    shutil.copytree(small / "small-byte-level", folder)
    path, count = folder / "tokenizer.json", 0
    text = path.read_text()
    num_merges = len(json.loads(text)["model"]["merges"])
    for name, change in CHANGES.items():
        if name.startswith("merge") and int(name.split()[1]) + 1 >= num_merges:
            continue
        document = json.loads(text)
        change(document)
        path.write_text(json.dumps(document))
        count += kept.differs(load_tokenizer(folder))
    assert count >= 100
    path.write_text(text)
    assert not kept.differs(load_tokenizer(folder))


def in_another_order(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: in_another_order(value[name]) for name in sorted(value, reverse=True)}
    return [in_another_order(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["small-byte-level", "small-digits", "small-hf"])
def test_digest_does_not_depend_on_the_order_of_keys(
    name: str, small: Path, tmp_path: Path
) -> None:
    before = load_tokenizer(small / name)
    folder = tmp_path / name
    shutil.copytree(small / name, folder)
    for path in folder.glob("*.json"):
        path.write_text(json.dumps(in_another_order(json.loads(path.read_text())), indent=2))
    assert load_tokenizer(folder).definition_sha256 == before.definition_sha256
    wide = load_tokenizer(folder, vocab_size=5000)
    assert wide.definition_sha256 == before.at_width(9000).definition_sha256
    assert wide.definition_sha256 == before.definition_sha256


def test_tokenizers_loaded_by_transformers(small: Path) -> None:
    """Calls change padding and truncation, which are not part of the definition."""
    from transformers import AutoTokenizer

    folder = small / "small-byte-level"
    loaded: Any = AutoTokenizer.from_pretrained(str(folder))
    loaded(["a", "b c d"], padding=True, truncation=True, max_length=9)
    digest = load_tokenizer(folder).definition_sha256
    assert from_transformers(loaded).definition_sha256 == digest


def test_get_map_notes_why_it_rebuilds(small: Path, digits: Tokenizer, tmp_path: Path) -> None:
    folder, path = tmp_path / "small-byte-level", tmp_path / "m.safetensors"
    shutil.copytree(small / "small-byte-level", folder)

    def asked_again() -> list[str]:
        notes: list[str] = []
        xtok.get_map(load_tokenizer(folder), digits, path=path, note=notes.append)
        return notes

    def definitions() -> dict[str, str]:
        checked = verify(path, xtok.load_pair(load_tokenizer(folder), digits))
        return {c.name: c.level for c in checked.checks if c.name.endswith("definition")}

    assert asked_again() == []
    assert asked_again() == [f"{path} exists, and is kept"]
    assert definitions() == {"student definition": "ok", "teacher definition": "ok"}
    document = json.loads((folder / "tokenizer.json").read_text())
    without(0)(document)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    assert definitions() == {"student definition": "failed", "teacher definition": "ok"}
    [replaced] = asked_again()
    assert f"{path} exists, and is replaced: " in replaced
    assert "small-byte-level" in replaced
    assert definitions()["student definition"] == "ok"
    kept = xtok.ProjectionMap.load(path)
    sides = {s: replace(getattr(kept, s), definition_sha256=None) for s in ("student", "teacher")}
    replace(kept, **sides).save(path)
    assert definitions() == {"student definition": "skipped", "teacher definition": "skipped"}
    [replaced] = asked_again()
    assert "an earlier version wrote the map" in replaced


def changes_of_sentencepiece() -> Iterator[Change]:
    def normalizes(name: str, proto: Any) -> None:
        setattr(proto.normalizer_spec, name, not getattr(proto.normalizer_spec, name))

    def never(index: int, proto: Any) -> None:
        proto.pieces[index].score = -1e6

    for name in ("add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces"):
        yield partial(normalizes, name)
    for index in range(262, 500, 5):
        yield partial(never, index)
    yield lambda proto: setattr(proto.pieces[300], "type", 5)


def test_every_change_of_a_sentencepiece_model(
    small: Path, sentencepiece: Tokenizer, digits: Tokenizer, tmp_path: Path
) -> None:
    kept, path = Kept(sentencepiece, digits), tmp_path / "small.model"
    count = 0
    for change in changes_of_sentencepiece():
        changed = sentencepiece_with(small / "small.model", path, change)
        count += kept.differs(load_tokenizer(changed))
    assert count >= 15


@pytest.mark.parametrize("kind", ["tiktoken", "tekken"])
def test_another_split_pattern_changes_the_digest(
    kind: str, small: Path, digits: Tokenizer, tmp_path: Path
) -> None:
    def load(pattern: str) -> Tokenizer:
        if kind == "tiktoken":
            return load_tokenizer(f"{small / 'small.tiktoken'}@{pattern}")
        path = tmp_path / "tekken.json"
        return load_tokenizer(tekken_file(path, small, config={"pattern": pattern}))

    patterns = [r"\p{N}{1,3}|[^\p{N}]+", r"\p{N}|[^\p{N}]+", r" ?\S+|\s", r"\w+|\W", r"(?s:.)"]
    kept = Kept(load(patterns[0]), digits)
    assert not kept.differs(load(patterns[0]))
    assert all(kept.differs(load(pattern)) for pattern in patterns[1:])


def test_special_tokens_of_configs_change_the_digest(
    small: Path, byte_level: Tokenizer, digits: Tokenizer, tmp_path: Path
) -> None:
    """Roles decide which special tokens match."""
    kept = Kept(byte_level, digits)
    folder = copy_folder(
        small / "small-byte-level", tmp_path / "small-byte-level", generation_config={
            "eos_token_id": 1}
    )  # fmt: skip
    assert kept.differs(load_tokenizer(folder))


def test_word_piece_and_lower_case(tmp_path: Path, digits: Tokenizer) -> None:
    cased = load_tokenizer(word_piece(tmp_path / "cased" / "m", lowercase=False))
    assert Kept(cased, digits).differs(
        load_tokenizer(word_piece(tmp_path / "uncased" / "m", lowercase=True))
    )


def test_a_folder_with_a_sentencepiece_file(small: Path, digits: Tokenizer, tmp_path: Path) -> None:
    shutil.copy(small / "small.model", tmp_path / "tokenizer.model")
    config = {"bos_token": "<s>", "added_tokens_decoder": {
        "600": {"content": "<tool>", "special": False}}}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text("{}")
    before = load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).definition_sha256 != before.definition_sha256
