"""The collator: both tokenizations, targets, and chunks, in this process and in workers."""

from __future__ import annotations

import pickle  # noqa: TID251
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_families import CHAT, TURNS
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_inputs import check_same_batch
from make_tokenizers import qwen_like
from torch.utils.data import DataLoader
from wrong_predictions import MISTAKES, random_rows

import xtok
from xtok import DistillationCollator, XtokError
from xtok.alignment.aligner import shift_to_predictions
from xtok.tokenizers import Tokenizer
from xtok.training.batches import predicted
from xtok.training.collator import prepare
from xtok.training.topk_collator import TopKCollator

TEXTS = ["The keeper lit 201 lamps.", "Light", ""]


@pytest.fixture(scope="module")
def collator(digits: Tokenizer, byte_level: Tokenizer) -> DistillationCollator:
    return DistillationCollator(digits, byte_level)


def test_batches_of_texts_have_ids_masks_and_labels(
    collator: DistillationCollator, digits: Tokenizer, byte_level: Tokenizer
) -> None:
    batch = collator(TEXTS)
    [side] = batch["teachers"]
    for tokenizer, part in ((digits, batch), (byte_level, side)):
        [bos] = tokenizer.table.roles["bos"]
        [pad] = tokenizer.table.roles["pad"]
        for row, text in enumerate(TEXTS):
            ids = [bos, *tokenizer.segment(text.encode())]
            padding = part["input_ids"].shape[1] - len(ids)
            assert part["input_ids"][row].tolist() == [*ids, *[pad] * padding]
            assert part["attention_mask"][row].tolist() == [1] * len(ids) + [0] * padding
            assert part["labels"][row].tolist() == [*ids, *[-100] * padding]
    aligned = collator.aligners[0].align(
        batch["input_ids"], side["input_ids"], student_attention_mask=batch["attention_mask"],
        teacher_attention_mask=side["attention_mask"],
    )  # fmt: skip
    assert type(side["alignment"]) is type(aligned)
    check_same_batch(batch, {**batch, "teachers": [{**side, "alignment": aligned}]})
    assert int(aligned.num_chunks[0]) > 5


CHANGED = ["cafe\u0301", "\u212b", "\u0344", "o\u0323\u0302", "\u1100\u1161"]  # by NFC


@pytest.fixture(scope="module")
def nfc(small: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Return a tokenizer with a normalizer, like Qwen3's, and the library's tokenizer."""
    from transformers import AutoTokenizer

    folder = qwen_like(small, tmp_path_factory.mktemp("nfc") / "folder", "NFC")
    return xtok.load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))


@settings(max_examples=60)
@given(
    texts=st.lists(
        st.lists(st.sampled_from(["<think>", "<|im_end|>", *CHANGED]), max_size=4), min_size=1
    )
)
def test_a_side_that_normalizes_has_its_librarys_ids(
    nfc: tuple[Tokenizer, Any], digits: Tokenizer, texts: list[list[str]]
) -> None:
    student, library = nfc
    rows = ["the keeper lit 201 lamps ".join(["", *parts, ""]) for parts in texts]
    batch = DistillationCollator(student, digits, bos=False)(rows)
    [side] = batch["teachers"]
    for row, text in enumerate(rows):
        ids = batch["input_ids"][row][batch["attention_mask"][row] != 0].tolist()
        assert ids == library(text, add_special_tokens=False)["input_ids"]
        theirs = side["input_ids"][row][side["attention_mask"][row] != 0].tolist()
        assert theirs == digits.encode(text).ids.tolist()
        chunk = side["alignment"].student_chunk_id[row][: len(ids)]
        correct = (chunk >= 0) & side["alignment"].pair_is_correct[row][chunk]
        aligned = b"".join(
            student.table[i] for i, keep in zip(ids, correct, strict=True) if keep
        ).decode("utf-8", "ignore")
        # Only text that the normalizer changes may be lost, with the tokens that contain it.
        assert aligned.count("keeper lit 201 lamps") == 1 + len(texts[row])


def test_several_teachers_or_none(
    digits: Tokenizer, byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    batch = DistillationCollator(digits, [byte_level, sentencepiece], bos=False, eos=True)(TEXTS)
    ends = [t.table.roles["eos"][0] for t in (digits, byte_level, sentencepiece)]
    sides = [batch, *batch["teachers"]]
    assert [int(s["input_ids"][2, 0]) for s in sides] == ends
    assert batch["teachers"][1]["alignment"].num_chunks.tolist()[2] == 1
    texts_only = DistillationCollator(digits, [], bos=False, eos=True)(TEXTS)
    assert texts_only["teachers"] == []
    assert torch.equal(texts_only["input_ids"], batch["input_ids"])


def chat_collator(digits: Tokenizer, byte_level: Tokenizer, **options: Any) -> Any:
    return DistillationCollator(
        digits, byte_level, student_template="chatml", teacher_templates=[TURNS], **options
    )


def test_only_answers_of_conversations_are_targets(
    digits: Tokenizer, byte_level: Tokenizer
) -> None:
    with pytest.warns(UserWarning, match="no end-of-turn token"):
        batch = chat_collator(digits, byte_level)([CHAT, {"messages": CHAT}, {"text": TEXTS[0]}])
    [side] = batch["teachers"]
    for tokenizer, part in ((digits, batch), (byte_level, side)):
        labels, ids = part["labels"][0], part["input_ids"][0]
        assert torch.equal(labels, part["labels"][1])
        targets = labels[labels >= 0].tolist()
        assert torch.equal(labels[labels >= 0], ids[labels >= 0])
        text = b"".join(tokenizer.table[i] for i in targets)
        assert b"There are 201 steps." in text
        assert b"How many" not in text
    aligned = side["alignment"]
    valid = aligned.pair_valid[0]
    for name, labels in (("student", batch["labels"]), ("teacher", side["labels"])):
        ids = getattr(aligned, f"{name}_chunk_id")[0]
        assert bool((labels[0][ids >= 0] >= 0).all())
        assert sorted(set(ids[ids >= 0].tolist())) == list(range(int(valid.sum())))
    assert bool(aligned.pair_is_correct[0][valid].all())
    assert int(valid.sum()) == int(aligned.num_chunks[0]) > 3
    assert int(aligned.pair_valid[2].sum()) > 5


def test_rows_of_data_sets(digits: Tokenizer, byte_level: Tokenizer) -> None:
    """A row's variables and tools, also as JSON strings, reach the templates of both sides."""
    template = (
        "{% for tool in tools or [] %}{{ tool.name }};{% endfor %}{% for m in messages %}"
        "[{{ m.role }}, {{ mood }}]{{ m.content }}<|im_end|>{% endfor %}"
    )
    collator = DistillationCollator(
        digits, byte_level, student_template=template, teacher_templates=[template]
    )
    row = {"messages": CHAT, "chat_template_kwargs": {"mood": "glad"}, "tools": [{"name": "f"}]}
    written = {**row, "chat_template_kwargs": '{"mood": "glad"}', "tools": '[{"name": "f"}]'}
    batch = collator([row, written])
    for tokenizer, side in ((digits, batch), (byte_level, batch["teachers"][0])):
        for ids, kept in zip(side["input_ids"], side["attention_mask"] != 0, strict=True):
            text = b"".join(tokenizer.table[i] for i in ids[kept].tolist())
            assert text.startswith(b"f;[user, glad]How many steps?[assistant, glad]There")
    with pytest.raises(XtokError, match="sample 0: the value of 'tools'"):
        collator([{**row, "tools": "f"}])


@pytest.mark.filterwarnings("ignore:.*the targets contain no end-of-turn token")
@pytest.mark.parametrize("sample", [TEXTS[0], CHAT])
def test_a_sample_that_is_cut_has_whole_chunks(
    digits: Tokenizer, byte_level: Tokenizer, sample: Any
) -> None:
    whole = chat_collator(digits, byte_level)([sample])["teachers"][0]["alignment"]
    counts = []
    longest = max(whole.student_chunk_id.shape[1], whole.teacher_chunk_id.shape[1])
    for length in range(1, longest + 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batch = chat_collator(digits, byte_level, max_length=length)([sample])
        aligned = batch["teachers"][0]["alignment"]
        counts.append(int(aligned.pair_valid.sum()))
        is_idle = counts[-1] == 0 and bool((batch["labels"] >= 0).any())
        assert any("no chunk of this batch" in str(w.message) for w in caught) == is_idle
        for name in ("student", "teacher"):
            ids = getattr(aligned, f"{name}_chunk_id")[0]
            full = getattr(whole, f"{name}_chunk_id")[0]
            assert ids[ids >= 0].tolist() == full[(full >= 0) & (full < counts[-1])].tolist()
    assert counts == sorted(counts)
    assert counts[-1] == int(whole.pair_valid.sum()) > counts[0]
    with pytest.raises(ValueError, match="max_length is 0"):
        DistillationCollator(digits, byte_level, max_length=0)


def test_prepare_shifts_targets_and_alignments(collator: DistillationCollator) -> None:
    batch = collator(TEXTS)
    ready = prepare(collator(TEXTS))
    [side] = ready["teachers"]
    expected = shift_to_predictions(batch["teachers"][0]["alignment"])
    for name, value in vars(expected).items():
        assert torch.equal(getattr(side["shifted"], name), value)
    assert ready["targets"][0].tolist() == [*batch["labels"][0, 1:].tolist(), -100]
    assert predicted(torch.tensor([[1, 2]]), fill=0).tolist() == [[2, 0]]


def test_targets_have_the_bytes_that_they_cover(sentencepiece: Tokenizer) -> None:
    """SentencePiece adds a space before a text; the space is not counted as a byte of the text."""
    collate = DistillationCollator(sentencepiece, sentencepiece, eos=True)
    batch = prepare(collate([{"text": "In 2014 there", "teacher_context": "In "}, "fog"]))
    [side] = batch["teachers"]
    names = [sentencepiece.table.name(i) for i in batch["input_ids"][0].tolist()]
    assert names == ["<s>", " I", "n", " ", "2", "0", "1", "4", " the", "re", "</s>"]
    text, short = [1, 1, 1, 1, 1, 1, 1, 4, 2, 0, 0], [1, 2, 0]
    assert collate.target_bytes(0, batch).tolist() == [text, short + [0] * 8]
    assert collate.target_bytes(1, side).tolist() == [[0, 0, 0, *text], short + [0] * 11]
    del batch["samples"]
    assert collate.target_bytes(0, batch)[:, 0].tolist() == [2, 2]
    cut = DistillationCollator(sentencepiece, [], max_length=3)
    assert cut.target_bytes(0, prepare(cut(["In 2014 there"]))).tolist() == [[1, 1, 0]]
    conversation = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "No."}]
    chats = DistillationCollator(sentencepiece, [], student_template="plain")
    assert int(chats.target_bytes(0, prepare(chats([conversation]))).sum()) == len("No.")


def test_every_kind_of_tokenizer_can_be_pickled(
    byte_level: Tokenizer, sentencepiece: Tokenizer, ranks: Tokenizer
) -> None:
    original = DistillationCollator(byte_level, [sentencepiece, ranks])
    again = pickle.loads(pickle.dumps(original))
    check_same_batch(again(TEXTS), original(TEXTS))


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_of_a_data_loader_make_the_same_batches(
    collator: DistillationCollator, context: str
) -> None:
    loader: DataLoader[Any] = DataLoader(
        TEXTS * 2,  # type: ignore[arg-type]
        batch_size=2,
        collate_fn=collator,
        num_workers=1,
        multiprocessing_context=context,
    )
    batches = list(loader)
    assert len(batches) == 3
    for batch, start in zip(batches, (0, 2, 4), strict=True):
        check_same_batch(batch, collator((TEXTS * 2)[start : start + 2]))


def test_error_names_the_invalid_sample(
    collator: DistillationCollator, byte_level: Tokenizer
) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        collator([])
    for sample, problem in (
        (3, "sample 1: int is neither"),
        (
            {"prompt": "x", "completion": "y"},
            "sample 1: .*only: prompt",
        ),
        (
            {"text": None, "messages": None},
            "sample 1: .*only: nothing",
        ),
        ({"text": 3}, "sample 1: .*'text' is int"),
        ({"text": ["x"]}, "sample 1: .*'text' is list"),
    ):
        with pytest.raises(XtokError, match=problem):
            collator(["x", sample])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="1 teachers, but 2 templates"):
        DistillationCollator(byte_level, byte_level, teacher_templates=["chatml", None])
    words = xtok.load_tokenizer("null:5")
    with pytest.raises(XtokError, match="cannot encode 'The keeper"):
        DistillationCollator(words, byte_level)(TEXTS)


# Stored predictions

STORED: list[dict[str, Any]] = [
    {
        "input_ids": [5, 6, 7, 8], "topk_ids": [[], [6, 2], [], [1, 0, 8]],
        "topk_logprobs": [[], [-0.5, -1.5], [], [-1.0, -1.25, -2.0]],
        "rest_logprob": [None, -1.75, None, None], "loss_mask": [False, True, True, True],
        "id": "a",
    },
    {
        "input_ids": [5, 6, 7], "topk_ids": [[], [6], [7]],
        "topk_logprobs": [[], [-0.25], [-0.5]], "rest_logprob": [None, -1.5, -1.0],
        "loss_mask": [True, True, False], "valid": [True, True, True],
    },
]  # fmt: skip


def test_stored_predictions_are_padded_and_complemented() -> None:
    none = -torch.inf
    batch = prepare(TopKCollator(pad_id=3)(STORED))
    [side] = batch["teachers"]
    stored = side["stored"]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [5, 6, 7, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["targets"].tolist() == [[6, 7, 8, -100], [6, -100, -100, -100]]
    assert stored.top_ids.tolist() == [
        [[0, 0, 0], [6, 2, 0], [0, 0, 0], [1, 0, 8]],
        [[0, 0, 0], [6, 0, 0], [7, 0, 0], [0, 0, 0]],
    ]
    assert stored.top_logprobs[0, :2].tolist() == [[none] * 3, [-0.5, -1.5, none]]
    lacking = stored.rest_logprob[0, 3].item()  # null: the remainder of the candidates' sum to 1
    assert lacking == pytest.approx(float((1 - stored.top_logprobs[0, 3].exp().sum()).log()))
    assert stored.rest_logprob.tolist() == [[none, -1.75, none, lacking], [none, -1.5, -1.0, none]]
    assert stored.valid.tolist() == [[False, True, False, True], [False, True, False, False]]
    assert (stored.top_ids.dtype, stored.top_logprobs.dtype) == (torch.int64, torch.float32)
    cut = TopKCollator(max_length=2)(STORED)
    assert cut["input_ids"].tolist() == [[5, 6], [5, 6]]
    assert torch.equal(cut["teachers"][0]["stored"].top_ids, stored.top_ids[:, :2])


def top(ids: list[Any], logprobs: list[Any]) -> dict[str, Any]:
    return {"topk_ids": ids, "topk_logprobs": logprobs}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_ids": [[6, 2], [7]]}, "topk_ids has 2 values"),
        ({"valid": [True]}, "valid has 1 values"),
        ({"topk_ids": [[], [6, 7], []]}, "different numbers"),
        (top([[6], [7], [8]], [[-1.0]] * 3), "row 0 must be empty"),
        (
            top([[], [6, 6], [8]], [[], [-1.0, -2.0], [-1.0]]),
            "token 1 .*candidate 6",
        ),
        ({"topk_logprobs": [[], [0.25], [-0.5]]}, "0.25"),
        ({"topk_logprobs": [[], [float("nan")], [-0.5]]}, "nan"),
        (
            top([[], [6, 7], [8]], [[], [-0.1, -0.1], [-1.0]]),
            "token 1 .*2.03",
        ),
        (
            top([[], [6, 2**32], [8]], [[], [-1.0] * 2, [-1.0]]),
            "token 1 .*id 4294967296",
        ),
        (
            top([[], [6, -2], [8]], [[], [-1.0] * 2, [-1.0]]),
            "token 1 .*id -2",
        ),
        (
            top([[], [10**20], [8]], [[], [-1.0], [-1.0]]),
            "topk_ids contains 10{20}",
        ),
        ({"loss_mask": ["False"] * 3}, "loss_mask contains"),
        ({"valid": [1, 2, 1]}, "valid contains"),
        ({"attention_mask": [1, 1, 0]}, "attention_mask"),
    ],
)
def test_bad_stored_predictions(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopKCollator()([STORED[1] | change])


def test_labels_of_stored_predictions_are_read_if_there_is_no_loss_mask() -> None:
    row = STORED[1] | {"labels": [-100, -100, 7], "attention_mask": [1, 1, 1]}
    unmasked = {name: values for name, values in row.items() if name != "loss_mask"}
    batch = TopKCollator()([row | {"labels": [5]}, unmasked])  # labels beside a mask are unused
    assert batch["labels"].tolist() == [[5, 6, -100], [-100, -100, 7]]
    stored = batch["teachers"][0]["stored"]
    assert stored.valid.tolist() == [[False, True, False], [False, False, True]]


def test_bad_batches_of_stored_predictions() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        TopKCollator()([])
    with pytest.raises(ValueError, match="a row has no input_ids"):
        TopKCollator()(["a text"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="max_length is -1"):
        TopKCollator(max_length=-1)


@pytest.mark.parametrize("make", [list, np.array])
def test_a_token_without_candidates_may_be_null(make: Any) -> None:
    row = STORED[1] | top([None, make([6]), None], [None, make([-0.5]), None])
    [empty], [null] = (
        TopKCollator()([record])["teachers"]
        for record in (row | top([[], [6], []], [[], [-0.5], []]), row)
    )
    for name, values in vars(empty["stored"]).items():
        assert torch.equal(values, vars(null["stored"])[name])


def test_placeholders_of_predictions_are_not_stored() -> None:
    """Placeholders for −∞, an id of −1, and a first token with probability 1."""
    row = STORED[1] | {
        "topk_ids": [[5], [6, 3, 4, -1, -1], [7]],
        "topk_logprobs": [[0.0], [-0.25, -9999.0, None, -0.5, -0.5], [-9999.0]],
    }
    [plain], [odd] = (TopKCollator()([record])["teachers"] for record in (STORED[1], row))
    assert odd["stored"].top_ids.tolist() == [[[0] * 5, [6, 0, 0, 0, 0], [0] * 5]]
    assert odd["stored"].top_logprobs[0, 1, 0] == plain["stored"].top_logprobs[0, 1, 0]
    assert torch.isneginf(odd["stored"].top_logprobs).sum() == 14
    assert odd["stored"].valid.tolist() == [[False, True, False]]


NUM_REFUSED = {
    "no mistake": 0,
    **dict.fromkeys(MISTAKES, 100),
    "base 2": 82,
    "multiplied": 86,
    "another tokenizer": 89,
}


@pytest.mark.parametrize("name", NUM_REFUSED)
def test_collator_refuses_impossible_rows(name: str) -> None:
    """Without the size of the vocabulary, fewer rows are provably impossible."""
    refused = 0
    for seed in range(100):
        rows = random_rows(seed)
        text, ids, logprobs = MISTAKES[name](*rows) if name in MISTAKES else rows[:3]
        row: dict[str, Any] = {"input_ids": text.tolist()}
        row["topk_ids"] = [[], *(values.tolist() for values in ids[1:])]
        row["topk_logprobs"] = [[], *(values.tolist() for values in logprobs[1:])]
        try:
            TopKCollator()([row])
        except ValueError:
            refused += 1
    assert refused == NUM_REFUSED[name]
