"""`TokenAligner` in the place of NeMo-RL's, under small stand-ins that call it as NeMo-RL does.

NeMo-RL itself is not installed. Read, not run: its collator and losses at commit 7ea279a; the chat
collators of its open pull request 3286, whose later state calls `align_chat`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from xtok import TokenAligner, build
from xtok.tokenizers import from_transformers

TEXTS = ["The quick brown fox, 2024 of them;  das Größte — 東京都\n", "In 201 words: 東京 x", ""]
CHAT = [
    {"role": "user", "content": "the 2024 text?"},
    {"role": "assistant", "content": "In 201 words: 東京  of them"},
    {"role": "user", "content": "of them?"},
    {"role": "assistant", "content": "of them"},
]
FIELDS = {  # the fields of NeMo-RL's AlignmentBatch that its losses read, and their types
    "pair_valid": torch.bool,
    "pair_is_correct": torch.bool,
    "student_exact_partition_mask": torch.bool,
    "teacher_exact_partition_mask": torch.bool,
    "student_chunk_id": torch.int64,
    "teacher_chunk_id": torch.int64,
    "num_chunks": torch.int64,
}


@pytest.fixture(scope="module")
def pair(small: Path) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    names = ("small-byte-level", "small-digits")
    return tuple(AutoTokenizer.from_pretrained(str(small / name)) for name in names)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def map_path(pair: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("map") / "map.pt"
    build(from_transformers(pair[0]), from_transformers(pair[1])).save(path)
    return str(path)


@pytest.fixture
def aligner(pair: tuple[Any, Any], map_path: str) -> TokenAligner:
    """As its `setup` makes one."""
    return TokenAligner(
        student_tokenizer=pair[0], teacher_tokenizer=pair[1], projection_matrix_path=map_path
    )


def tokenize(tokenizer: Any, texts: list[str], length: int) -> dict[str, torch.Tensor]:
    encoded: dict[str, torch.Tensor] = tokenizer(
        texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt",
        return_offsets_mapping=True, padding_side="right",
    )  # fmt: skip
    return encoded


@pytest.mark.parametrize("with_offsets", [False, True], ids=["0.8.0", "pull request"])
@pytest.mark.parametrize("length", [64, 7])
def test_a_text_collator(
    aligner: TokenAligner, pair: tuple[Any, Any], with_offsets: bool, length: int
) -> None:
    sides = [tokenize(tokenizer, TEXTS, length) for tokenizer in pair]
    extra: dict[str, Any] = {}
    if with_offsets:
        extra["student_offsets"], extra["teacher_offsets"] = (e["offset_mapping"] for e in sides)
    found = aligner.align(
        sides[0]["input_ids"],
        sides[1]["input_ids"],
        student_attention_mask=sides[0]["attention_mask"],
        teacher_attention_mask=sides[1]["attention_mask"],
        **extra,
    )
    batch = {f"alignment_0_{f.name}": getattr(found, f.name) for f in fields(found)}
    assert {name.removeprefix("alignment_0_"): t.dtype for name, t in batch.items()} == FIELDS
    check_loss(batch, sides)
    for side, encoded, tokenizer in zip(("student", "teacher"), sides, pair, strict=True):
        chunk = batch[f"alignment_0_{side}_chunk_id"]
        assert not (chunk[encoded["attention_mask"] == 0] >= 0).any()
        if length == 64:
            text = encoded["attention_mask"].bool()
            special = torch.isin(encoded["input_ids"], torch.tensor(tokenizer.all_special_ids))
            assert (chunk[text & ~special] >= 0).all()


def check_loss(batch: dict[str, torch.Tensor], sides: list[dict[str, torch.Tensor]]) -> None:
    """Use the fields as its losses do: shift, mean of each chunk, chunks that both sides have."""
    valid = batch["alignment_0_pair_valid"] & batch["alignment_0_pair_is_correct"]
    width = valid.shape[1]
    assert width >= 1
    sizes = []
    for side, encoded in zip(("student", "teacher"), sides, strict=True):
        chunk = batch[f"alignment_0_{side}_chunk_id"]
        assert chunk.shape == encoded["input_ids"].shape
        assert chunk.max() < width
        shifted = torch.nn.functional.pad(chunk[:, 1:], (0, 1), value=-1)
        members = (shifted.unsqueeze(-1) == torch.arange(width).view(1, 1, -1)).float()
        sizes.append(members.sum(1))
        logits = torch.randn(*chunk.shape, 5)
        means = members.transpose(1, 2) @ logits / (sizes[-1].unsqueeze(-1) + 1e-10)
        assert means.isfinite().all()
    both = (sizes[0] > 0) & (sizes[1] > 0)
    assert (both.sum(1) <= batch["alignment_0_num_chunks"]).all()
    assert (both & valid).any()


def test_a_batch_without_any_chunk_has_room_for_one(aligner: TokenAligner) -> None:
    ids = torch.zeros((2, 3), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    found = aligner.align(ids, ids, student_attention_mask=mask, teacher_attention_mask=mask)
    assert found.pair_valid.tolist() == found.pair_is_correct.tolist() == [[False]] * 2
    assert found.num_chunks.tolist() == [0, 0]


# Chat


@dataclass
class TheirPair:
    """A pair as NeMo-RL's own class has it."""

    s_tokens: list[str]
    t_tokens: list[str]
    s_start: int
    s_end: int
    t_start: int
    t_end: int
    is_correct: bool = False


@dataclass
class Rendered:
    ids: list[int]
    offsets: list[tuple[int, int]]
    mask: list[int]
    spans: list[tuple[int, int]]
    text: str


def render(tokenizer: Any, header: str, end: str) -> Rendered:
    """Render `CHAT` with a side's own template, and find what the assistant wrote."""
    text, spans = "", []
    for message in CHAT:
        text += header.format(message["role"])
        if message["role"] == "assistant":
            spans.append((len(text), len(text) + len(message["content"])))
        text += message["content"] + end
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = [(int(a), int(b)) for a, b in encoded["offset_mapping"]]
    mask = [int(any(s <= a < b <= e for s, e in spans)) for a, b in offsets]
    return Rendered(list(encoded["input_ids"]), offsets, mask, spans, text)


@pytest.fixture
def rendered(pair: tuple[Any, Any]) -> tuple[Rendered, Rendered]:
    return (
        render(pair[0], "<|im_start|>{}\n", "<|im_end|>"),
        render(pair[1], "[{}]", "<|end_of_text|>"),
    )


END = b"<|im_end|>/<|end_of_text|>"


def chunks_of(aligner: TokenAligner, batch: Any, sides: tuple[Rendered, Rendered]) -> list[bytes]:
    """The bytes of each chunk, equal on both sides; of special tokens, both names."""
    chunks = []
    for k in range(int(batch.num_chunks[0])):
        pieces = []
        for side, of_side in zip(sides, ("student", "teacher"), strict=True):
            table = getattr(aligner, of_side).table
            chunk = getattr(batch, f"{of_side}_chunk_id")[0, : len(side.ids)].tolist()
            ids = [i for i, c in zip(side.ids, chunk, strict=True) if c == k]
            names = [table.control_names[i].encode() for i in ids if i in table.control_names]
            pieces.append(b"".join(names) or b"".join(table[i] for i in ids))
        assert pieces[0] == pieces[1] or b"/".join(pieces) == END
        chunks.append(pieces[0] if pieces[0] == pieces[1] else END)
    return chunks


@pytest.mark.parametrize("drop_first", [False, True])
def test_a_chat_collator_that_asks_for_pairs(
    aligner: TokenAligner, rendered: tuple[Rendered, Rendered], drop_first: bool
) -> None:
    assert aligner.alignment_method in ("offset_cluster_decode_fix", "same_tokenizer_identity")
    s, t = rendered
    raw = aligner.align_one_offset_per_asst(
        s.ids, s.offsets, s.spans, t.ids, t.offsets, t.spans,
        student_asst_mask=s.mask, teacher_asst_mask=t.mask, drop_first_content_pair=drop_first,
    )  # fmt: skip
    pairs = [TheirPair(p[0], p[1], p[2], p[3], p[4], p[5], p[6]) for p in raw]
    batch = aligner._pairs_to_batch([pairs, []], b=2, t_s=len(s.ids) + 2, t_t=len(t.ids) + 1)
    assert {f.name: getattr(batch, f.name).dtype for f in fields(batch)} == FIELDS
    assert batch.num_chunks.tolist() == [len(raw), 0]
    assert batch.pair_is_correct[0].all()
    answers = b"".join(chunks_of(aligner, batch, rendered)).split(END)
    written = [CHAT[1]["content"].encode(), CHAT[3]["content"].encode(), b""]
    if drop_first:
        first = pairs[0].s_start
        assert answers[1:] != written[1:]
        assert all(w.endswith(a) for w, a in zip(written, answers, strict=True))
        assert first > s.mask.index(1)
    else:
        assert answers == written
    last = pairs[-1].s_start
    mask = torch.ones((2, len(s.ids) + 2))
    mask[0, last:] = 0
    aligner._drop_padding(batch, student_attention_mask=mask, teacher_attention_mask=None)
    assert batch.student_chunk_id[0, last:].tolist() == [-1] * (len(s.ids) + 2 - last)
    assert not batch.student_exact_partition_mask[0, last:].any()
    assert batch.teacher_chunk_id[0, pairs[-1].t_start] == len(pairs) - 1


def test_a_chat_collator_that_asks_for_a_batch(
    aligner: TokenAligner, rendered: tuple[Rendered, Rendered]
) -> None:
    s, t = rendered
    arguments: dict[str, Any] = {
        f"{side}_{name}": value
        for side, r in (("student", s), ("teacher", t))
        for name, value in (
            ("offsets", torch.tensor([r.offsets])),
            ("asst_char_spans", [r.spans]),
            ("attention_mask", torch.ones(1, len(r.ids))),
            ("asst_mask", torch.tensor([r.mask])),
            ("eot_indices", [[[a for a, _ in r.offsets].index(end) for _, end in r.spans]]),
            ("alignment_regions", None),
            ("answer_parts", None),
            ("rendered_texts", [r.text]),
        )
    }  # fmt: skip
    batch = aligner.align_chat(
        torch.tensor([s.ids]), torch.tensor([t.ids]),
        drop_first_content_pair=False, included_regions=None, **arguments,
    )  # fmt: skip
    assert {f.name: getattr(batch, f.name).dtype for f in fields(batch)} == FIELDS
    answers = b"".join(chunks_of(aligner, batch, rendered)).split(END)
    assert answers == [CHAT[1]["content"].encode(), CHAT[3]["content"].encode(), b""]
    arguments["teacher_asst_char_spans"] = [t.spans[:1]]
    with pytest.raises(ValueError, match="row 0: the student has 2 assistant messages"):
        aligner.align_chat(torch.tensor([s.ids]), torch.tensor([t.ids]), **arguments)


@dataclass
class Part:
    name: str
    span: tuple[int, int]
    text: str


def test_regions_and_parts_of_an_answer(
    aligner: TokenAligner, rendered: tuple[Rendered, Rendered]
) -> None:
    s, t = rendered
    regions = [
        [{"reasoning": (a, a + 3), "answer": (a + 3, b)} for a, b in side.spans]
        for side in rendered
    ]

    def text(*included: str, **options: Any) -> str:
        raw = aligner.align_one_offset_per_asst(
            s.ids, s.offsets, s.spans, t.ids, t.offsets, t.spans,
            student_alignment_regions=regions[0], teacher_alignment_regions=regions[1],
            included_regions=included or None, **options,
        )  # fmt: skip
        batch = aligner._pairs_to_batch([raw], b=1, t_s=len(s.ids), t_t=len(t.ids))
        return b"".join(chunks_of(aligner, batch, rendered)).decode()

    assert text("answer") == "201 words: 東京  of them" + "m"  # ' the' crosses the bounds
    assert text("reasoning").startswith("In")
    assert text("eot") == END.decode() * 2
    parts: Any = [
        [
            [Part("a", (a + 3, a + 6), "201"), Part("b", (a + 7, a + 12), "words" + side)],
            None,
        ]
        for side, a in (("", s.spans[0][0]), ("!", t.spans[0][0]))
    ]
    options = {"student_answer_parts": parts[0], "teacher_answer_parts": parts[1]}
    assert text("answer", **options) == "201" + "m"
    with pytest.raises(ValueError, match=r"included_regions are \['all'\]: reasoning, close, an"):
        text("all")
    regions[1] = [{"answer": span} for span in t.spans]
    with pytest.raises(ValueError, match="one side alone has the region reasoning"):
        text()


def test_the_identity_method_refuses_other_ids(pair: tuple[Any, Any]) -> None:
    aligner = TokenAligner(pair[0], pair[0], None, alignment_method="same_tokenizer_identity")
    assert aligner.alignment_method == "same_tokenizer_identity"
    s = render(pair[0], "<|im_start|>{}\n", "<|im_end|>")
    same = aligner.align_one_offset_per_asst(s.ids, s.offsets, s.spans, s.ids, s.offsets, s.spans)
    assert all(p.is_correct and p.s_end - p.s_start == 1 for p in same)
    other = [i + 1 for i in s.ids]
    with pytest.raises(ValueError, match="is same_tokenizer_identity, and the ids differ"):
        aligner.align_one_offset_per_asst(s.ids, s.offsets, s.spans, other, s.offsets, s.spans)
    with pytest.raises(ValueError, match="alignment_method is 'dp'"):
        TokenAligner(*pair, alignment_method="dp")
