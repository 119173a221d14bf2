"""Batches of conversations: `collate`, and `unpad` as its inverse."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rendered_chats import GENERATES, SPACED

from xtok.conversation import (
    collate,
    render,
    unpad,
)
from xtok.tokenizers import Tokenizer


@pytest.mark.parametrize("side", ["left", "right"])
def test_unpad_is_the_inverse_of_collate(byte_level: Tokenizer, side: Any) -> None:
    chats = [
        render(byte_level, chat, template="chatml") for chat in (SPACED[3:], SPACED, SPACED[:1])
    ]
    batch = collate(chats, pad_id=7, padding_side=side)
    width, lengths = max(len(chat.ids) for chat in chats), [len(chat.ids) for chat in chats]
    assert batch["ids"].shape == batch["assistant_mask"].shape == (3, width)
    padding = [7] * (width - lengths[0])
    row = [*padding, *chats[0].ids] if side == "left" else [*chats[0].ids, *padding]
    assert batch["ids"][0].tolist() == row
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert batch["text"] == [chat.text for chat in chats]
    for sample, chat in zip(unpad(batch), chats, strict=True):
        assert list(sample) == ["ids", "assistant_mask", "message_spans", "text"]
        assert sample["ids"].tolist() == chat.ids.tolist()
        assert sample["assistant_mask"].tolist() == chat.assistant_mask.tolist()
        assert (sample["text"], sample["message_spans"]) == (chat.text, chat.message_spans)
    rows = collate([chat.record() for chat in chats], pad_id=7, padding_side=side)
    assert np.array_equal(rows["input_ids"], batch["ids"])
    assert np.array_equal(rows["labels"] != -100, batch["assistant_mask"])
    assert np.array_equal(rows["attention_mask"], batch["attention_mask"])


def test_other_fields_of_a_batch() -> None:
    import torch

    samples = [
        {"ids": [1, 2], "labels": np.array([1, 2]), "teacher": torch.tensor([5, 6, 7]),
         "reward": 0.5, "types": [0, 1], "spans": [4], "logits": np.ones((2, 3), np.float32)},
        {"ids": [3], "labels": np.array([3]), "teacher": torch.tensor([8]),
         "reward": 1.0, "types": [1], "spans": [5, 6], "logits": np.ones((1, 3), np.float32)},
    ]  # fmt: skip
    batch = collate(samples, pad_id=9, pad_values={"teacher": -1})
    values = {name: np.asarray(batch[name]).tolist() for name in batch if name != "spans"}
    ones, zeros = [1.0] * 3, [0.0] * 3
    assert values == {
        "ids": [[1, 2], [9, 3]],
        "labels": [[1, 2], [-100, 3]],
        "teacher": [[5, 6, 7], [-1, -1, 8]],
        "reward": [0.5, 1.0],
        "types": [[0, 1], [0, 1]],  # integers, one per token
        "logits": [[ones, ones], [zeros, ones]],
        "attention_mask": [[True, True], [False, True]],
    }
    assert batch["spans"] == [[4], [5, 6]]
    with pytest.raises(ValueError, match="the same fields"):
        collate([samples[0], {"ids": np.array([1])}], pad_id=0)


def test_unpad_accepts_tensors_and_other_fields() -> None:
    import torch

    batch = {
        "input_ids": torch.tensor([[9, 1], [2, 3], [9, 9]]),
        "attention_mask": torch.tensor([[0, 1], [1, 1], [0, 0]]),
        "reward": np.array([0.5, 1.0, 2.0]),
        "tags": ["a", "b", "c"],
    }
    rows = unpad(batch)
    assert isinstance(rows[0]["input_ids"], torch.Tensor)
    assert [row["input_ids"].tolist() for row in rows] == [[1], [2, 3], []]
    assert (rows[1]["reward"], rows[1]["tags"]) == (1.0, "b")
    assert unpad({"pad": [[1, 0]], "ids": np.array([[5, 6]])}, mask="pad")[0]["ids"].tolist() == [5]
    assert unpad({"attention_mask": np.zeros((0, 3))}) == []


@pytest.mark.parametrize("side", ["left", "right"])
def test_unpad_cuts_the_lists_that_transformers_pads(small: Path, side: str) -> None:
    from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained
    library = load(str(small / "small-byte-level"), padding_side=side)
    options = {"return_assistant_tokens_mask": True, "return_dict": True}
    make = partial(library.apply_chat_template, chat_template=GENERATES, **options)
    chats = [SPACED[3:], SPACED]
    batch = make(chats, padding=True)
    assert isinstance(batch["input_ids"], list)
    batch["tags"] = [["a"], ["b"]]
    for chat, sample, tags in zip(chats, unpad(batch), batch["tags"], strict=True):
        single = make(chat)
        assert set(single.pop("attention_mask")) == {1}
        assert sample == {**single, "tags": tags}


def test_a_mask_of_the_samples_is_kept() -> None:
    samples = [
        {"input_ids": [9, 1], "attention_mask": [0, 1]},
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]},
    ]
    batch = collate(samples, pad_id=9)
    assert batch["attention_mask"].tolist() == [[False, False, True], [True, True, True]]
    assert [row["input_ids"].tolist() for row in unpad(batch)] == [[1], [1, 2, 3]]
    with pytest.raises(ValueError, match="attention_mask"):
        collate([{"ids": [1, 2], "attention_mask": [1]}], pad_id=0)


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (
            {"attention_mask": [[1, 0], [1, 1]], "ids": [[1, 2]]},
            "ids has 1 rows, but attention_mask has 2 rows",
        ),
        (
            {"attention_mask": [[1, 1, 1], [1, 0, 1]]},
            "row 1",
        ),
        ({"attention_mask": [[0, 2]]}, "not a mask"),
        ({"ids": [[1]]}, "attention_mask"),
    ],
)
def test_unpad_rejects_invalid_masks(batch: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        unpad({name: np.array(rows) for name, rows in batch.items()})
