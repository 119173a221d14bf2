"""A teacher that reads more than the student: the text before, for the teacher alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from test_collator import assert_same

from xtok import DistillationCollator
from xtok.tokenizers import Tokenizer
from xtok.training.collator import prepare

TEXT = "The keeper lit 201 lamps."
CONTEXT = "Notes on the light: 201 lamps. "


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_a_context_is_read_by_the_teacher_alone(
    digits: Tokenizer, byte_level: Tokenizer, sentencepiece: Tokenizer, bos: bool, eos: bool
) -> None:
    collator = DistillationCollator(digits, [byte_level, sentencepiece], bos=bos, eos=eos)
    plain = collator([TEXT, TEXT])
    batch = collator([{"text": TEXT, "teacher_context": [CONTEXT, None]}, {"text": TEXT}])
    assert torch.equal(batch["input_ids"], plain["input_ids"])
    assert_same(
        {**batch, "teachers": batch["teachers"][1:]}, {**plain, "teachers": plain["teachers"][1:]}
    )
    [side, usual] = batch["teachers"][0], plain["teachers"][0]
    ids = usual["input_ids"][0].tolist()
    context = byte_level.encode(CONTEXT).ids.tolist()
    assert side["input_ids"][0].tolist() == [*ids[:bos], *context, *ids[bos:]]
    labels = usual["labels"][0].tolist()
    assert side["labels"][0].tolist() == [*labels[:bos], *[-100] * len(context), *labels[bos:]]
    chunk, usual_chunk = (x["alignment"].teacher_chunk_id[0].tolist() for x in (side, usual))
    assert chunk == [*usual_chunk[:bos], *[-1] * len(context), *usual_chunk[bos:]]
    for name in ("student_chunk_id", "pair_valid", "pair_is_correct", "num_chunks"):
        assert torch.equal(getattr(side["alignment"], name), getattr(usual["alignment"], name))
    # The first token is predicted by the context, also where a teacher has no bos.
    first = int(
        prepare(batch)["teachers"][0]["shifted"].teacher_chunk_id[0, len(context) + bos - 1]
    )
    assert first == bos


def test_a_context_that_says_nothing_changes_nothing(
    digits: Tokenizer, byte_level: Tokenizer
) -> None:
    collator = DistillationCollator(digits, byte_level, max_length=6)
    for nothing in ("", None, [""], [None]):
        assert_same(collator([{"text": TEXT, "teacher_context": nothing}]), collator([TEXT]))


def test_the_context_is_cut_from_its_left_and_the_text_never(
    digits: Tokenizer, byte_level: Tokenizer
) -> None:
    context = byte_level.encode(CONTEXT).ids.tolist()
    sample = {"text": TEXT, "teacher_context": CONTEXT}
    [usual] = DistillationCollator(digits, byte_level)([TEXT])["teachers"]
    ids = usual["input_ids"][0].tolist()
    for room in range(-2, len(context) + 1):
        length = len(ids) + room
        collator = DistillationCollator(digits, byte_level, max_length=length)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            [side] = collator([sample])["teachers"]
        kept = context[len(context) - max(0, room) :]
        assert side["input_ids"][0].tolist() == [ids[0], *kept, *ids[1:]][:length]
        chunk = side["alignment"].teacher_chunk_id[0]
        usual_chunk = collator([TEXT])["teachers"][0]["alignment"].teacher_chunk_id[0]
        assert chunk.tolist() == [*usual_chunk[:1], *[-1] * len(kept), *usual_chunk[1:]]
        notes = [str(w.message) for w in said]
        assert any("cuts what" in note for note in notes) == (room < len(context))
        assert any("sample 0 (to nothing)" in note for note in notes) == (room <= 0)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"text": TEXT, "teacher_context": 3}, "sample 0: teacher_context is neither"),
        ({"text": TEXT, "teacher_context": [CONTEXT]}, "one for each of 2 teachers"),
        ({"text": TEXT, "teacher_context": [3, None]}, "teacher_context has what is no text"),
    ],
)  # fmt: skip
def test_bad_contexts(digits: Tokenizer, byte_level: Tokenizer, sample: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillationCollator(digits, [byte_level, byte_level])([sample])
