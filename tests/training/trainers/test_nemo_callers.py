"""`TokenAligner` as a replacement of NeMo-RL's, called by small copies of NeMo-RL's calls.

NeMo-RL is not installed. Its collator and losses were read at commit 7ea279a.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from xtok import XtokError, build, spellings
from xtok.tokenizers import from_transformers
from xtok.training.trainers.nemo_rl import NemoTokenAligner as TokenAligner

TEXTS = ["The quick brown fox, 2024 of them;  das Größte — 東京都\n", "In 201 words: 東京 x", ""]
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
def library_tokenizers(small: Path) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    names = ("small-byte-level", "small-digits")
    return tuple(AutoTokenizer.from_pretrained(str(small / name)) for name in names)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def map_path(library_tokenizers: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("map") / "map.pt"
    build(from_transformers(library_tokenizers[0]), from_transformers(library_tokenizers[1])).save(
        path
    )
    return str(path)


@pytest.fixture
def aligner(library_tokenizers: tuple[Any, Any], map_path: str) -> TokenAligner:
    """Create an aligner like NeMo-RL's `setup`."""
    return TokenAligner(
        student_tokenizer=library_tokenizers[0],
        teacher_tokenizer=library_tokenizers[1],
        projection_matrix_path=map_path,
    )


def tokenize(tokenizer: Any, texts: list[str], length: int) -> dict[str, torch.Tensor]:
    encoded: dict[str, torch.Tensor] = tokenizer(
        texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt",
        padding_side="right",
    )  # fmt: skip
    return encoded


@pytest.mark.parametrize("length", [64, 7])
def test_a_text_collator(
    aligner: TokenAligner, library_tokenizers: tuple[Any, Any], length: int
) -> None:
    sides = [tokenize(tokenizer, TEXTS, length) for tokenizer in library_tokenizers]
    alignment = aligner.align(
        sides[0]["input_ids"],
        sides[1]["input_ids"],
        student_attention_mask=sides[0]["attention_mask"],
        teacher_attention_mask=sides[1]["attention_mask"],
    )
    batch = {f"alignment_0_{f.name}": getattr(alignment, f.name) for f in fields(alignment)}
    assert {name.removeprefix("alignment_0_"): t.dtype for name, t in batch.items()} == FIELDS
    check_loss(batch, sides)
    for side, encoded, tokenizer in zip(
        ("student", "teacher"), sides, library_tokenizers, strict=True
    ):
        chunk = batch[f"alignment_0_{side}_chunk_id"]
        assert not (chunk[encoded["attention_mask"] == 0] >= 0).any()
        if length == 64:
            text = encoded["attention_mask"].bool()
            special = torch.isin(encoded["input_ids"], torch.tensor(tokenizer.all_special_ids))
            assert (chunk[text & ~special] >= 0).all()


def check_loss(batch: dict[str, torch.Tensor], sides: list[dict[str, torch.Tensor]]) -> None:
    """Use the fields like NeMo-RL's losses: shift, mean per chunk, chunks of both sides."""
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


def test_offsets_of_the_draft_have_no_effect(
    library_tokenizers: tuple[Any, Any], aligner: TokenAligner
) -> None:
    """The calls equal `_call_text` of its collator, branch xtoken-offset-alignment (e2722b1)."""
    sides = [
        tokenizer(
            TEXTS, padding=True, return_tensors="pt", padding_side="right",
            return_offsets_mapping=True,
        )
        for tokenizer in library_tokenizers
    ]  # fmt: skip
    ids = [side["input_ids"] for side in sides]
    masks = {
        f"{name}_attention_mask": side["attention_mask"]
        for name, side in zip(("student", "teacher"), sides, strict=True)
    }
    aligned = aligner.align(
        *ids, student_offsets=sides[0]["offset_mapping"],
        teacher_offsets=torch.zeros_like(sides[1]["offset_mapping"]), **masks,
    )  # fmt: skip
    without = aligner.align(*ids, **masks)
    assert int(without.pair_valid.sum()) > 20
    for field in fields(without):
        assert torch.equal(getattr(aligned, field.name), getattr(without, field.name))


def test_a_table_of_the_draft_is_a_map(library_tokenizers: tuple[Any, Any], tmp_path: Path) -> None:
    models = [from_transformers(tokenizer) for tokenizer in library_tokenizers]
    path = tmp_path / "tables.pt"
    spellings(*models).save(path)
    loaded = TokenAligner(*library_tokenizers, str(path))
    ids = [tokenize(tokenizer, TEXTS[1:2], 12)["input_ids"] for tokenizer in library_tokenizers]
    aligned = loaded.align(*ids)
    assert int(aligned.pair_is_correct.sum()) == int(aligned.pair_valid.sum()) > 5
    with pytest.raises(XtokError, match="swapped") as error:
        TokenAligner(*library_tokenizers[::-1], str(path))
    assert "xtok.spellings(student, teacher)" in error.value.hint
