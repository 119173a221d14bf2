"""The student's ids as the teacher's tokens: equal bytes in every family of tokenizers."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Tokenizers
from hypothesis import given
from hypothesis import strategies as st
from make_tokenizers import qwen_like
from tokenizers import AddedToken
from tokenizers import Tokenizer as Rust
from torch.nn.utils.rnn import pad_sequence

import xtok
from xtok import DistillationCollator, Retokenizer
from xtok.tokenizers import Tokenizer
from xtok.training.collator import prepare

TEXT = "The keeper lit 201 lamps — día tras día, 灯台.\n\n\tEnd  "


def bytes_of(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.table[i] for i in ids)


@pytest.mark.parametrize(
    "sides",
    [
        ("digits", "byte_level"), ("byte_level", "sentencepiece"), ("sentencepiece", "byte_level"),
        ("sentencepiece", "ranks"), ("ranks", "digits"),
    ],
)  # fmt: skip
def test_retokenized_ids_spell_the_same_bytes(
    sides: tuple[str, str], tokenizers: Tokenizers
) -> None:
    student, teacher = (tokenizers[name] for name in sides)
    retokenize = Retokenizer(xtok.load_pair(student, teacher))
    data = TEXT.encode()
    for cut in (data, data[:31], data[35:], b" leading", b"", b"\xff\x00"):
        [ids] = retokenize([student.segment(cut)])
        assert ids == teacher.segment(cut)
        assert bytes_of(teacher, ids) == cut


@given(data=st.data())
def test_random_ids_are_retokenized_to_the_same_bytes(
    data: st.DataObject, digits: Tokenizer, sentencepiece: Tokenizer
) -> None:
    ids = data.draw(st.lists(st.sampled_from(digits.table.text_ids.tolist()), max_size=30))
    [teacher] = Retokenizer(xtok.load_pair(digits, sentencepiece))([ids])
    assert bytes_of(sentencepiece, teacher) == bytes_of(digits, ids)


def test_rows_may_be_arrays(digits: Tokenizer, byte_level: Tokenizer) -> None:
    to_teacher = Retokenizer(xtok.load_pair(digits, byte_level))
    ids = digits.encode_batch(["the keeper lit lamps"])[0]
    as_array: Any = torch.tensor(ids).numpy()
    assert to_teacher([as_array]) == to_teacher([ids])


def test_white_space_after_an_added_token_that_strips_it(
    digits: Tokenizer, small: Path, tmp_path: Path
) -> None:
    rust = Rust.from_file(str(small / "small-byte-level" / "tokenizer.json"))
    rust.add_tokens([AddedToken("</x>", rstrip=True, normalized=False)])
    rust.save(str(tmp_path / "tokenizer.json"))
    teacher = xtok.load_tokenizer(tmp_path)
    assert not teacher.keeps_text
    assert [name for name, _ in teacher.text_changes] == ["added tokens"]
    [ids] = Retokenizer(xtok.load_pair(digits, teacher))([digits.segment(b"a</x> b")])
    assert bytes_of(teacher, ids) == b"a</x> b"


def test_control_tokens_become_the_teachers_or_are_dropped(
    byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    roles, teacher = byte_level.table.roles, sentencepiece.table.roles
    [begin], [end] = teacher["bos"], teacher["eos"]
    row = [roles["bos"][0], roles["turn_start"][0], *byte_level.segment(b"Hello"), roles["eos"][0]]
    [ids] = Retokenizer(xtok.load_pair(byte_level, sentencepiece))(
        [row]
    )  # the teacher has no token that starts a turn
    assert ids == [begin, *sentencepiece.segment(b"Hello"), end]


def test_a_sequence_starts_with_the_teachers_bos(
    byte_level: Tokenizer, sentencepiece: Tokenizer, ranks: Tokenizer
) -> None:
    texts = b"The lamp wa", b"s lit"
    (prompt, answer), apart, ranks_ids = (
        [*map(side.segment, texts)] for side in (byte_level, sentencepiece, ranks)
    )
    [begin], [bos] = sentencepiece.table.roles["bos"], byte_level.table.roles["bos"]
    retokenizer = Retokenizer(xtok.load_pair(byte_level, sentencepiece))
    assert retokenizer.sequence(prompt, answer) == [begin, *chain(*apart)]
    assert retokenizer.sequence([bos, *prompt], answer) == [begin, *chain(*apart)]
    assert retokenizer.sequence() == [begin]
    without = Retokenizer(xtok.load_pair(byte_level, ranks))  # a tokenizer without a bos token
    assert without.sequence(prompt, answer) == [*chain(*ranks_ids)]


def test_ids_beyond_the_tokenizer(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    """The model's width is 1,280, but its tokenizer has 1,200 ids; the other ids have no text."""
    hello = byte_level.segment(b"Hello")
    retokenize = Retokenizer(xtok.load_pair(byte_level, sentencepiece))
    assert len(byte_level.table) == 1280
    assert retokenize([[*hello, 1279]]) == retokenize([hello])
    with pytest.raises(ValueError, match=r"^student id 1280 "):
        retokenize([[*hello, 1280]])


def test_a_teacher_that_normalizes_reads_the_ids_of_its_library(
    byte_level: Tokenizer, small: Path, tmp_path: Path
) -> None:
    teacher = xtok.load_tokenizer(qwen_like(small, tmp_path / "nfc", "NFC"))
    text = "<think>cafe\u0301<think> hi "
    written = byte_level.segment(text.encode() + "東".encode()[:2])  # half a character at the end
    [ids] = Retokenizer(xtok.load_pair(byte_level, teacher))([written])
    assert ids == [*teacher.library_ids([text])[0], *teacher.segment("東".encode()[:2])]


# Batches of the student's ids


def padded_rows(
    tokenizer: Tokenizer, *rows: tuple[str, str], side: str
) -> tuple[torch.Tensor, ...]:
    """Return ids, mask and labels of prompts and completions that end with eos."""
    [pad], [eos] = tokenizer.table.roles["pad"], tokenizer.table.roles["eos"][:1]
    ids, mask, labels = [], [], []
    for prompt, completion in rows:
        p, c = (tokenizer.segment(text.encode()) for text in (prompt, completion))
        ids.append(torch.tensor([*p, *c, eos]))
        mask.append(torch.ones_like(ids[-1]))
        labels.append(torch.tensor([-100] * len(p) + [*c, eos]))
    return tuple(
        pad_sequence(part, batch_first=True, padding_value=value, padding_side=side)
        for part, value in ((ids, pad), (mask, 0), (labels, -100))
    )


PAIRS = [("The lamp", " was lit at 6:12."), ("How many steps? ", "201, he said: zweihunderteins")]


@pytest.mark.parametrize("side", ["left", "right"])
def test_every_token_of_a_completion_has_a_chunk(
    digits: Tokenizer, sentencepiece: Tokenizer, side: str
) -> None:
    collator = DistillationCollator(digits, sentencepiece)
    ids, mask, labels = padded_rows(digits, *PAIRS, side=side)
    batch = collator.from_student_ids(ids, mask, labels)
    [teacher] = batch["teachers"]
    assert batch["input_ids"] is ids
    [begin], [end] = (sentencepiece.table.roles[role] for role in ("bos", "eos"))
    for row, (prompt, completion) in enumerate(PAIRS):
        p, c = (sentencepiece.segment(text.encode()) for text in (prompt, completion))
        count = int(teacher["attention_mask"][row].sum())
        assert teacher["input_ids"][row][:count].tolist() == [begin, *p, *c, end]
        assert teacher["labels"][row][:count].tolist() == [-100] * (len(p) + 1) + [*c, end]
    alignment = teacher["alignment"]
    assert torch.equal(alignment.student_chunk_id >= 0, labels >= 0)
    assert torch.equal(alignment.teacher_chunk_id >= 0, teacher["labels"] >= 0)
    assert bool(alignment.pair_is_correct[alignment.pair_valid].all())
    # The prompt predicts the first token, so that no chunk is lost when they are shifted.
    shifted = prepare(batch)["teachers"][0]["shifted"]
    assert torch.equal(shifted.pair_valid, alignment.pair_valid)


def test_turns_in_between_are_no_targets(digits: Tokenizer, byte_level: Tokenizer) -> None:
    texts = b"ask", b" answer", b" tool", b" again"
    words, teacher = ([*map(tokenizer.segment, texts)] for tokenizer in (digits, byte_level))
    ids = torch.tensor([[*chain(*words)]])
    labels = torch.tensor([[i if n % 2 else -100 for n, part in enumerate(words) for i in part]])
    collator = DistillationCollator(digits, byte_level, bos=False)
    [side] = collator.from_student_ids(ids, torch.ones_like(ids), labels)["teachers"]
    assert side["input_ids"][0].tolist() == [*chain(*teacher)]
    assert torch.equal(side["alignment"].student_chunk_id >= 0, labels >= 0)
    assert bool(side["alignment"].pair_is_correct.all())


def test_ids_without_bytes_have_no_chunk(byte_level: Tokenizer, digits: Tokenizer) -> None:
    hello = byte_level.segment(b"Hello")
    ids = torch.tensor([[*hello, 1279, *hello]])
    collator = DistillationCollator(byte_level, digits, bos=False)
    [side] = collator.from_student_ids(ids, torch.ones_like(ids), ids)["teachers"]
    has_chunk = (side["alignment"].student_chunk_id >= 0)[0].tolist()
    assert has_chunk == [*[True] * len(hello), False, *[True] * len(hello)]


def test_a_teacher_cut_short(digits: Tokenizer, byte_level: Tokenizer) -> None:
    ids, mask, labels = padded_rows(digits, *PAIRS, side="left")
    collator = DistillationCollator(digits, byte_level, max_length=8)
    [side] = collator.from_student_ids(ids, mask, labels)["teachers"]
    assert side["input_ids"].shape == (2, 8)
    assert bool(side["alignment"].pair_is_correct[side["alignment"].pair_valid].all())


def test_normalized_and_truncated_text_has_no_chunk(
    digits: Tokenizer, composing: Tokenizer
) -> None:
    text = "lamps ﬁ".encode()
    ids = torch.tensor([digits.segment(text)])
    whole, cut = (
        DistillationCollator(digits, composing, max_length=end, bos=False).from_student_ids(
            ids, torch.ones_like(ids), ids
        )["teachers"][0]
        for end in (None, -1 + len(composing.segment(b"lamps fi")))
    )
    assert bytes_of(composing, whole["input_ids"][0].tolist()) == b"lamps fi"
    assert bytes_of(composing, cut["input_ids"][0].tolist()) == b"lamps f"
    assert whole["alignment"].pair_is_correct[0].tolist()[-1] is False
    assert int(cut["alignment"].num_chunks) == int(whole["alignment"].num_chunks) - 1
    assert bool(cut["alignment"].pair_is_correct.all())


def test_each_turn_is_aligned_separately(digits: Tokenizer, composing: Tokenizer) -> None:
    words = [digits.segment(part.encode()) for part in ("so", " ①", "and", "1①")]
    ids = torch.tensor([[*chain(*words)]])
    labels = torch.tensor([[i if n % 2 else -100 for n, part in enumerate(words) for i in part]])
    collator = DistillationCollator(digits, composing, bos=False)
    [side] = collator.from_student_ids(ids, torch.ones_like(ids), labels)["teachers"]
    alignment, turns = side["alignment"], []
    for side_labels, chunk in ((labels[0], "student"), (side["labels"][0], "teacher")):
        is_target = side_labels >= 0
        turn = torch.cumsum(is_target & ~is_target.roll(1), 0)
        chunks = getattr(alignment, f"{chunk}_chunk_id")[0]
        turns.append([turn[chunks == n].unique().tolist() for n in range(alignment.num_chunks)])
    assert turns[0] == turns[1]
    assert [1] in turns[0]
    assert [2] in turns[0]


def test_shapes_that_do_not_fit(digits: Tokenizer, byte_level: Tokenizer) -> None:
    collator = DistillationCollator(digits, byte_level)
    ids, mask, labels = padded_rows(digits, *PAIRS, side="left")
    for args in ((ids[0], mask, labels), (ids, mask[:1], labels)):
        with pytest.raises(ValueError, match=r", expected equal shapes \[B, T\]$"):
            collator.from_student_ids(*args)
    with pytest.raises(ValueError, match=r"^1 teacher_messages for 2"):
        collator.from_student_ids(ids, mask, labels, teacher_messages=[None])
    empty = torch.zeros((2, 0), dtype=torch.int64)
    [side] = collator.from_student_ids(empty, empty, empty)["teachers"]
    assert side["alignment"].num_chunks.tolist() == [0, 0]
