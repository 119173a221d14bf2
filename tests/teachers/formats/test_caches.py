"""Caches of every format give the same rows."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import stored_teachers as teachers
from make_maps import built
from naive_projecting import END, Small
from projected_caches import (
    K,
    Project,
    neutral,
    predicted,
    write,
)
from stored_teachers import Row, read_documents

import xtok
from xtok.config import BACK_MAP, CacheFormat, ProjectConfig
from xtok.errors import XtokError
from xtok.teachers.formats.caches import open_cache
from xtok.teachers.formats.distillkit import Bin, Compression, decompressed_rows
from xtok.tokenizers import Tokenizer

KINDS = (
    *("neutral", "sglang", "distillkit", "distillkit, compressed"),
    *("vllm", "vllm, gz", "vllm, chat"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_all_formats_give_the_same_rows(
    kind: str, rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    path = write(tmp_path, kind, rows, byte_level.vocabulary.vocab_size)
    assert open_cache(path).kind == kind.partition(",")[0]
    read_rows = neutral(read_documents(path, byte_level))
    assert [{name: row[name] for name in rows[0]} for row in read_rows] == rows
    for row in read_rows:
        assert row["rest_logprob"][0] is row["realized_logprob"][0] is None
        own = [
            dict(zip(ids, logprobs, strict=True))[token]
            for token, ids, logprobs in list(zip(*map(row.get, teachers.NAMES), strict=True))[1:]
        ]
        assert row["realized_logprob"][1:] == own
        rests = [1 - sum(map(math.exp, logprobs)) for logprobs in row["topk_logprobs"][1:]]
        assert row["rest_logprob"][1:] == pytest.approx([math.log(r) for r in rests], rel=1e-4)


def test_a_batch_of_prompts_in_the_same_response(
    rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    read_rows = neutral(read_documents(write(tmp_path, "vllm, a batch", rows, 0), byte_level))
    assert [row["id"] for row in read_rows] == [f"all-{n}" for n in range(len(rows))]
    assert [row["topk_ids"] for row in read_rows] == [row["topk_ids"] for row in rows]


def test_several_completions_of_the_same_prompt(
    rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    """With `n: 2`, vLLM's response contains the predictions of each prompt twice."""
    choices = [teachers.vllm_response(row)["choices"][0] for row in rows for _ in range(2)]
    ids = [choice.pop("prompt_token_ids") for choice in choices[::2]]
    usage = {"prompt_tokens": sum(map(len, ids))}
    response = {"id": "all", "choices": choices, "prompt": ids, "usage": usage}
    path = teachers.write_lines(tmp_path / "a.jsonl", [response])
    read_rows = neutral(read_documents(path, byte_level))
    assert [row["id"] for row in read_rows] == [
        "all-0",
        "all-1",
        "all-2",
        "all-3",
        "all-4",
        "all-5",
    ]
    assert [row["topk_ids"] for row in read_rows] == [row["topk_ids"] for row in rows]


def test_large_row_groups_come_in_pieces(
    rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    """Memory depends neither on the file size nor on the sizes of row groups."""
    path = teachers.write_neutral(tmp_path / "a.parquet", rows * 50, row_group_size=300)
    sizes = [len(part.topk.ids) for part in read_documents(path, byte_level, candidates=4000)]
    assert len(sizes) > 10
    assert max(sizes) < 8000
    lines = write(tmp_path, "vllm", rows * 50, 0)
    parts = read_documents(lines, byte_level, candidates=4000)
    assert len(parts[0].topk.ids) < 8000
    assert len(neutral(parts)) == 300


def test_distillkits_compression_is_decoded() -> None:
    """Two exact values, a line through the deltas of the others, and residuals of four bits."""
    config = Compression(
        d=300, k=4, exact_k=2, exact_dtype="float16", polynomial_terms=[0, 1],
        residual_bins=[Bin("float32", 4, 2)],
    )  # fmt: skip
    data = np.array([-1.5, -0.5], "<f2").tobytes() + np.array([-0.25, -0.5, 0.125], "<f4").tobytes()
    data += bytes([0b1001_0110])  # 9 − 8 and 6 − 8
    values = np.frombuffer(data, np.uint8)
    ids = np.array(teachers.packed([f"{i:09b}" for i in (299, 0, 7, 256)]), np.uint8)
    both = [(np.array([0, len(a)]), a) for a in (ids, values)]
    candidates = decompressed_rows(both[0], both[1], config, "here")
    assert candidates[0].tolist() == [[299, 0, 7, 256]]
    # −1.5, then deltas −0.5, −0.25 + 0.125, −0.75 − 0.25
    assert candidates[1].tolist() == [[-1.5, -2.0, -2.125, -3.125]]
    with pytest.raises(XtokError, match=r"here: .*too short"):
        decompressed_rows(both[0], both[1], config._replace(exact_k=4), "here")


@pytest.mark.parametrize("to", ["neutral", "vllm", "distillkit"])
def test_equal_tokenizers_keep_every_row(
    to: CacheFormat, rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    path = teachers.write_neutral(tmp_path / "a.parquet", rows)
    out = tmp_path / ("out.jsonl" if to == "vllm" else "out.parquet")
    config = ProjectConfig(top_k=K, to=to)
    pair = xtok.load_pair(byte_level, byte_level)
    back_map = built(byte_level, byte_level, BACK_MAP)
    projected = xtok.project(path, pair, out, config, back_map=back_map)
    tokens = sum(len(row["input_ids"]) for row in rows)
    assert (projected.student_tokens, projected.targets) == (tokens, tokens - len(rows))
    written = neutral(read_documents(out, byte_level))
    assert [{name: row[name] for name in rows[0]} for row in written] == rows


def test_the_config_of_another_cache_is_not_replaced(
    rows: list[Row], byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    """A compressed cache requires its own config. An equal config can be written again."""
    path = teachers.write_distillkit(tmp_path / "a.parquet", rows, compressed=True, d=4096)
    config = tmp_path / "compression_config.yaml"
    before = config.read_bytes()
    pair, to = xtok.load_pair(digits, byte_level), ProjectConfig(to="distillkit")
    with pytest.raises(XtokError, match=str(config)):
        xtok.project(path, pair, tmp_path / "out.parquet", to, back_map=back_map)
    assert config.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"a.parquet", "compression_config.yaml"}
    out = tmp_path / "new" / "out.parquet"
    for _ in range(2):
        xtok.project(path, pair, out, to, back_map=back_map)
    assert {p.name for p in out.parent.iterdir()} == {"out.parquet", "compression_config.yaml"}


def test_the_first_token_has_no_prediction(
    sentencepiece: Tokenizer, ranks: Tokenizer, project: Project
) -> None:
    """The student has no BOS token, and the teacher's text begins with one."""
    ids = [sentencepiece.table.roles["bos"][0], *sentencepiece.segment("The lighthouse")]
    assert "bos" not in ranks.table.roles
    _, [student_row] = project([{"id": "a", **predicted(sentencepiece, ids)}], ranks, sentencepiece)
    assert student_row["topk_ids"][0] == []
    assert student_row["rest_logprob"][0] is None
    assert any(student_row["topk_ids"])


def test_bits_per_byte_of_the_teacher(
    rows: list[Row], byte_level: Tokenizer, project: Project
) -> None:
    """The unit is −log₂ p of the text's own tokens per byte."""
    report, _ = project(rows)
    nats = num_bytes = 0.0
    for row in rows:
        for token, ids, logprobs in list(zip(*map(row.get, teachers.NAMES), strict=True))[1:]:
            nats -= dict(zip(ids, logprobs, strict=True))[token]
            num_bytes += len(byte_level.table[token])
    assert report.teacher_bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes)
    assert not report.teacher_is_bound
    assert report.notes == ()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("kind", "mask"),
    [("neutral", True), ("neutral", False), ("distillkit", False), ("vllm", False)],
)
def test_padding_is_not_text(
    kind: str, side: str, mask: bool, rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    """An attention mask marks padding; without it, the pad token does."""
    [pad] = byte_level.table.roles["pad"]
    row, count = rows[0], 3
    size = len(row["input_ids"])
    several = {"input_ids": [pad] * count, "topk_ids": [[]] * count, "topk_logprobs": [[]] * count}
    padded: Row = {"id": "row 0"}
    for name, more in several.items():
        padded[name] = row[name] + more if side == "right" else more + row[name]
    if kind == "distillkit":  # DistillKit adds one pad token after a text, and a row for it
        for name, last in (("topk_ids", [5, 6]), ("topk_logprobs", [-0.5, -1.0])):
            padded[name][-count if side == "right" else 0] = last
            padded[name] = [x if n and x else [*range(8)] for n, x in enumerate(padded[name])]
        padded["topk_logprobs"] = [
            [-2.5] * len(logprobs) if logprobs == [*range(8)] else logprobs
            for logprobs in padded["topk_logprobs"]
        ]
    if mask:
        masks = [[1] * size, [0] * count]
        first, last = masks if side == "right" else masks[::-1]
        padded["attention_mask"] = first + last
    path = write(tmp_path, kind, [padded], 1280)
    [documents] = read_documents(path, byte_level)
    assert documents.topk.token_ids.tolist() == row["input_ids"]
    assert documents.topk.valid.tolist() == [False] + [True] * (size - 1)
    assert neutral([documents])[0]["topk_ids"] == row["topk_ids"]


class PaddedByBos(Small):
    """Return a small vocabulary with a single token for pad and bos."""

    def declared_roles(self) -> dict[str, dict[int, str]]:
        return {"bos": {END: "the file"}, "pad": {END: "the file"}, "eos": {}}


def test_padding_by_the_bos_token_leaves_the_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer(PaddedByBos([b"a", b"b", b"c"], merges=False), model_id="small")
    ids = [*[END] * 3, 1, 2, 3, *[END] * 2]
    rows = [[], [], [], [1], [2], [3], [], []]
    logprobs = [[-0.5] * len(row) for row in rows]
    path = teachers.write_neutral(
        tmp_path / "a.parquet", [{"input_ids": ids, "topk_ids": rows, "topk_logprobs": logprobs}]
    )
    [documents] = read_documents(path, tokenizer)
    assert documents.topk.token_ids.tolist() == [END, 1, 2, 3]
    assert documents.topk.valid.tolist() == [False, True, True, True]


def test_masks_are_written_to_vllms_lines_and_read_again(
    rows: list[Row], digits: Tokenizer, byte_level: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    """The mask is the same after it is read back."""
    masked = {**rows[0], "loss_mask": [i > 4 for i in range(len(rows[0]["input_ids"]))]}
    path = teachers.write_neutral(tmp_path / "a.parquet", [masked])
    masks = []
    formats: list[CacheFormat] = ["vllm", "neutral"]
    for to in formats:
        out = tmp_path / f"out.{'jsonl' if to == 'vllm' else 'parquet'}"
        xtok.project(
            path, xtok.load_pair(digits, byte_level), out, ProjectConfig(to=to), back_map=back_map
        )
        [documents] = read_documents(out, digits)
        masks.append(np.array(documents.loss_mask).tolist())
    assert masks[0] == masks[1]
    assert 0 < sum(masks[0]) < len(masks[0])
