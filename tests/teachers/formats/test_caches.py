"""Caches of every format: what is read, what is written, and what is refused."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import stored_teachers as teachers
from naive_projecting import top_k
from stored_teachers import TEXTS, Row

import xtok
from xtok.config import CacheFormat, ProjectConfig
from xtok.errors import XtokError
from xtok.teachers.formats import axolotl, distillkit, vllm
from xtok.teachers.formats import neutral as neutral_format
from xtok.teachers.formats.caches import open_cache, read_cache
from xtok.teachers.formats.columns import Target
from xtok.teachers.formats.distillkit import Bin, Compression, decompressed_rows
from xtok.teachers.formats.topk import Documents
from xtok.tokenizers import Tokenizer

K = 8


@pytest.fixture(scope="module")
def rows(byte_level: Tokenizer) -> list[Row]:
    return teachers.rows_of(byte_level, TEXTS, K)


def write(path: Path, kind: str, rows: list[Row], d: int) -> Path:
    if kind == "neutral":
        return teachers.write_neutral(path / "a.parquet", rows)
    if kind == "sglang":
        return teachers.write_lines(path / "a.jsonl", [teachers.sglang_answer(r) for r in rows])
    if kind.startswith("distillkit"):
        compressed = kind.endswith("compressed")
        return teachers.write_distillkit(path / "a.parquet", rows, compressed=compressed, d=d)
    answers = [teachers.vllm_answer(row) for row in rows]
    if kind == "vllm, a batch":  # one request with several prompts
        choices = [answer["choices"][0] for answer in answers]
        answers = [{"id": "all", "choices": choices}]
    if kind == "vllm, chat":  # the answer has the prompt's fields, not its choices
        answers = [{"id": a["id"], **a["choices"][0], "choices": [{"index": 0}]} for a in answers]
    written = teachers.write_lines(path / "a.jsonl", answers)
    if kind == "vllm, gz":
        written = path / "a.jsonl.gz"
        written.write_bytes(gzip.compress((path / "a.jsonl").read_bytes()))
    return written


def read(path: Path, tokenizer: Tokenizer, candidates: int = 1 << 22) -> list[Documents]:
    cache = open_cache(path)
    return [
        cache.check(rows, tokenizer.vocabulary)
        for shard in cache.shards
        for rows, _ in read_cache(cache, shard, candidates)
    ]


def neutral(found: list[Documents]) -> list[Row]:
    return [row for rows in found for row in neutral_format.table(rows).to_pylist()]


KINDS = (
    *("neutral", "sglang", "distillkit", "distillkit, compressed"),
    *("vllm", "vllm, gz", "vllm, chat"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_all_formats_hold_the_same(
    kind: str, rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    path = write(tmp_path, kind, rows, byte_level.vocabulary.vocab_size)
    assert open_cache(path).kind == kind.partition(",")[0]
    found = neutral(read(path, byte_level))
    assert [{name: row[name] for name in rows[0]} for row in found] == rows
    for row in found:
        assert row["rest_logprob"][0] is row["realized_logprob"][0] is None
        own = [
            dict(zip(ids, logprobs, strict=True))[token]
            for token, ids, logprobs in list(zip(*map(row.get, teachers._NAMES), strict=True))[1:]
        ]
        assert row["realized_logprob"][1:] == own
        rests = [1 - sum(map(math.exp, logprobs)) for logprobs in row["topk_logprobs"][1:]]
        assert row["rest_logprob"][1:] == pytest.approx([math.log(r) for r in rests], rel=1e-4)


def test_one_answer_to_several_prompts(
    rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    found = neutral(read(write(tmp_path, "vllm, a batch", rows, 0), byte_level))
    assert [row["id"] for row in found] == [f"all-{n}" for n in range(len(rows))]
    assert [row["topk_ids"] for row in found] == [row["topk_ids"] for row in rows]


def test_large_row_groups_come_in_pieces(
    rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    """So that memory depends neither on the size of a file nor on how it was written."""
    path = teachers.write_neutral(tmp_path / "a.parquet", rows * 50, row_group_size=300)
    sizes = [len(part.topk.ids) for part in read(path, byte_level, candidates=4000)]
    assert len(sizes) > 10
    assert max(sizes) < 8000
    lines = write(tmp_path, "vllm", rows * 50, 0)
    found = read(lines, byte_level, candidates=4000)
    assert len(found[0].topk.ids) < 8000
    assert len(neutral(found)) == 300


def test_distillkits_approximation() -> None:
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
    found = decompressed_rows(both[0], both[1], config, "here")
    assert found[0].tolist() == [[299, 0, 7, 256]]
    # −1.5, then deltas −0.5, −0.25 + 0.125, −0.75 − 0.25
    assert found[1].tolist() == [[-1.5, -2.0, -2.125, -3.125]]
    with pytest.raises(XtokError, match=r"here: .*shorter"):
        decompressed_rows(both[0], both[1], config._replace(exact_k=4), "here")


# What is written


STORED = Documents(
    top_k([[5, 6, 7], [4, 8]], [{}, {6: 0.5, 2: 0.25}, {9: 0.5}, {}, {}], None),
    {"id": pyarrow.array(["a", None])},
    ["row 0", "row 1"],
    np.array([False, True, True, True, True]),
)
TO = Target(model="student", width=2, pad_id=99)


def rounded(values: Any) -> Any:
    if isinstance(values, list):
        return [rounded(value) for value in values]
    return round(values, 4) if isinstance(values, float) else values


def test_axolotls_columns() -> None:
    """Row i of token i + 1, renormalized, each entry with its mask; `DataCollatorForKD`, 0.19."""
    found = axolotl.table(STORED, TO).to_pydict()
    assert rounded([found[name] for name in found]) == [
        ["a", None],
        [[5, 6, 7], [4, 8]],
        [[1, 1, 1], [1, 1]],
        [[-100, 6, 7], [4, 8]],
        [[[6, 2], [9, 99], [99, 99]], [[99, 99], [99, 99]]],
        [[[-0.4055, -1.0986], [0.0, -1e9], [-1e9, -1e9]], [[-1e9, -1e9], [-1e9, -1e9]]],
        [[[1, 1], [1, 0], [0, 0]], [[0, 0], [0, 0]]],
    ]
    assert list(found)[1:] == [
        *("input_ids", "attention_mask", "labels"),
        *("target_token_ids", "target_logprobs", "target_mask"),
    ]


def test_axolotls_columns_of_unlikely_candidates() -> None:
    """Their probabilities are 0 in float32; what they are of each other is not."""
    topk = top_k([[5, 6]], [{}, {6: 0.5, 2: 0.5}], None)
    topk = topk._replace(logprobs=np.array([-200, -201], np.float32))
    table = axolotl.table(Documents(topk, {}, ["row 0"]), TO)
    assert rounded(table.to_pydict()["target_logprobs"]) == [[[-0.3133, -1.3133], [-1e9, -1e9]]]


def test_distillkits_columns() -> None:
    """Row i of token i + 1, as they are; what its trainer masks row i by is `labels[i]`."""
    found = distillkit.table(STORED, TO).to_pydict()
    found = {name: rounded(values) for name, values in found.items()}
    assert found == {
        "id": ["a", None],
        "input_ids": [[5, 6, 7], [4, 8]],
        "labels": [[5, 6, -100], [-100, -100]],
        "token_ids": [[[6, 2], [9, 99]], [[99, 99]]],
        "top_values": [[[-0.6931, -1.3863], [-0.6931, -1e4]], [[-1e4, -1e4]]],
    }


def test_vllms_lines() -> None:
    """Entries by rank, the text's own token where it belongs; null of the first token alone."""
    realized = np.array([np.nan, -0.7, -0.6, np.nan, np.nan], np.float32)
    topk = STORED.topk._replace(realized_logprob=realized)
    first, second = map(json.loads, vllm.lines(STORED._replace(topk=topk), "student"))
    [choice] = first["choices"]
    assert (first["id"], first["model"], choice["prompt_token_ids"]) == ("a", "student", [5, 6, 7])
    nothing, *entries = choice["prompt_logprobs"]
    assert nothing is None
    assert [
        [(i, e["rank"], round(e["logprob"], 4)) for i, e in row.items()] for row in entries
    ] == [
        [("6", 1, -0.6931), ("2", 2, -1.3863)],
        [("7", 1, -0.6), ("9", 2, -0.6931)],
    ]
    assert second["choices"][0]["prompt_logprobs"] == [None, {}]


@pytest.mark.parametrize("to", ["neutral", "vllm", "distillkit"])
def test_of_one_tokenizer_what_comes_out_is_what_went_in(
    to: CacheFormat, rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    path = teachers.write_neutral(tmp_path / "a.parquet", rows)
    out = tmp_path / ("out.jsonl" if to == "vllm" else "out.parquet")
    projected = xtok.project(
        path, xtok.pair(byte_level, byte_level), out, ProjectConfig(top_k=K, to=to)
    )
    tokens = sum(len(row["input_ids"]) for row in rows)
    assert (projected.student_tokens, projected.targets) == (tokens, tokens - len(rows))
    found = neutral(read(out, byte_level))
    assert [{name: row[name] for name in rows[0]} for row in found] == rows


# What is refused


def change(position: int, name: str, value: Any) -> Callable[[list[Row]], None]:
    def apply(rows: list[Row]) -> None:
        rows[1][name][position] = value

    return apply


def first_candidate(name: str, value: Any) -> Callable[[list[Row]], None]:
    def apply(rows: list[Row]) -> None:
        rows[1][name][3][0] = value

    return apply


def shift(by: int, *names: str) -> Callable[[list[Row]], None]:
    def apply(rows: list[Row]) -> None:
        for row in rows:
            for name in names:
                row[name] = row[name][by:] + row[name][:by]

    return apply


def realized(by: int) -> Callable[[list[Row]], None]:
    """Add what servers say of the text's own tokens, then move all rows."""

    def apply(rows: list[Row]) -> None:
        for row in rows:
            row["realized_logprob"] = [
                dict(zip(ids, logprobs, strict=True)).get(token)
                for token, ids, logprobs in zip(*map(row.get, teachers._NAMES), strict=True)
            ]
        shift(by, "topk_ids", "topk_logprobs", "realized_logprob")(rows)

    return apply


# What is wrong, and the position that the error names; none for all rows.
BAD: dict[str, tuple[Callable[[list[Row]], None], str]] = {
    "id": (change(3, "input_ids", 5000), "row 1, position 3"),
    "candidate": (first_candidate("topk_ids", -1), "row 1, position 3"),
    "−inf": (first_candidate("topk_logprobs", -math.inf), "row 1, position 3"),
    "NaN": (first_candidate("topk_logprobs", math.nan), "row 1, position 3"),
    "above 1": (first_candidate("topk_logprobs", 1.5), "row 1, position 3"),
    "sum": (change(3, "topk_logprobs", [-0.1] * K), "row 1, position 3"),
    "twice": (change(3, "topk_ids", [4] * K), "row 1, position 3"),
    "ragged": (change(3, "topk_logprobs", [-1.0]), "row 1, position 3"),
    "lengths": (lambda rows: rows[1]["topk_ids"].pop(), "row 1"),
    "next": (shift(1, "topk_ids", "topk_logprobs"), "row 0"),
    "last": (shift(-1, "topk_ids", "topk_logprobs"), "row 0"),
    "realized, too": (realized(1), "row 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows(name: str, rows: list[Row], byte_level: Tokenizer, tmp_path: Path) -> None:
    apply, place = BAD[name]
    bad = json.loads(json.dumps(rows))
    apply(bad)
    path = teachers.write_neutral(tmp_path / "a.parquet", bad)
    out = tmp_path / "out.parquet"
    with pytest.raises(XtokError) as error:
        xtok.project(path, xtok.pair(byte_level, byte_level), out)
    assert error.value.message.startswith(f"{path}, {place}: ")
    assert ("shifted" in error.value.message) == (place == "row 0")
    assert [*tmp_path.iterdir()] == [path]


def test_a_servers_rows_are_its_own_tokens(
    rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    """vLLM always has the text's own token, so that one row without it is enough."""
    answers = [teachers.vllm_answer(row) for row in rows]
    entries = answers[0]["choices"][0]["prompt_logprobs"]
    del entries[5][str(rows[0]["input_ids"][5])]
    path = teachers.write_lines(tmp_path / "a.jsonl", answers)
    with pytest.raises(XtokError, match=r"a.jsonl, line 1, position 5: "):
        read(path, byte_level)
    for answer in answers:
        del answer["choices"][0]["prompt_token_ids"]
    with pytest.raises(XtokError, match="prompt_token_ids"):
        read(teachers.write_lines(path, answers), byte_level)


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", b'{"a": 1}\n', ""),
        ("a.jsonl", b"{\n", ", line 1"),
        ("a.jsonl", b'{"prompt_logprobs": [null, {"x": 1}]}\n', ", line 1, position 1"),
        ("a.jsonl", b'{"meta_info": {}}\n', ", line 1"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"prompt_logprobs": []}\n', mtime=0)[:-9],
            " cannot be read",
        ),
        ("a.parquet", b"PAR1", " cannot be read"),
        ("a.parquet", b"", ""),
    ],
    ids=range(7),
)
def test_bad_files(
    name: str, content: bytes, place: str, byte_level: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(XtokError) as error:
        xtok.project(path, xtok.pair(byte_level, byte_level), tmp_path / "out.parquet")
    assert f"{path}{place}: " in error.value.message
    assert [*tmp_path.iterdir()] == [path]


def test_truncated_parquet(rows: list[Row], byte_level: Tokenizer, tmp_path: Path) -> None:
    """Its end is whole, a row group in the middle is not."""
    path = teachers.write_neutral(tmp_path / "a.parquet", rows)
    data = path.read_bytes()
    path.write_bytes(data[:3000] + b"\xff" * 200 + data[3200:])
    with pytest.raises(XtokError, match="cannot be read"):
        xtok.project(path, xtok.pair(byte_level, byte_level), tmp_path / "out.parquet")
    assert [*tmp_path.iterdir()] == [path]


def test_other_parquet(tmp_path: Path, rows: list[Row], byte_level: Tokenizer) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "packed_indices": [1]}), path)
    with pytest.raises(XtokError, match="text, packed_indices"):
        open_cache(path)
    teachers.write_distillkit(path, rows, compressed=True, d=512)
    (tmp_path / "compression_config.yaml").write_text("d: 512\n")
    with pytest.raises(XtokError, match=r"compression_config.yaml: .*exact_k"):
        open_cache(path)
    (tmp_path / "compression_config.yaml").unlink()
    with pytest.raises(XtokError, match=r"compression_config.yaml"):
        open_cache(path)


def test_renormalized_values_have_no_rest(
    rows: list[Row], byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    scaled = json.loads(json.dumps(rows))
    for row in scaled:
        for logprobs in row["topk_logprobs"]:
            total = sum(map(math.exp, logprobs))
            logprobs[:] = [value - math.log(total) for value in logprobs]
    path = teachers.write_neutral(tmp_path / "a.parquet", scaled)
    notes: list[str] = []
    out = tmp_path / "out.parquet"
    projected = xtok.project(
        path, xtok.pair(digits, byte_level), out, back_map=back_map, note=notes.append
    )
    assert projected.mean_rest is None
    assert "the rest is not known" in notes[0]
    table = pyarrow.parquet.read_table(out)
    assert table.schema.metadata[b"normalized"] == b"topk"
    assert all(v is None for row in table["rest_logprob"].to_pylist() for v in row)


@pytest.mark.parametrize("kind", ["neutral", "vllm"])
def test_rows_of_the_whole_vocabulary_have_no_rest(
    kind: str, byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    """They sum to 1 as renormalized ones do; a server says −9999 of what is impossible."""
    width = byte_level.vocabulary.vocab_size
    rows = teachers.rows_of(byte_level, TEXTS, width)
    for row in rows:
        for logprobs in row["topk_logprobs"][1:]:
            total = sum(map(math.exp, logprobs))
            logprobs[:] = [value - math.log(total) for value in logprobs]
            logprobs[-1] = -9999.0
    path = write(tmp_path, kind, rows, width)
    notes: list[str] = []
    out = tmp_path / "out.parquet"
    projected = xtok.project(
        path, xtok.pair(digits, byte_level), out, back_map=back_map, note=notes.append
    )
    assert all("do not begin with" in note for note in notes)
    assert projected.mean_rest is not None
    for part in read(path, byte_level):
        assert np.isneginf(part.topk.rest_logprob[part.topk.valid]).all()


@pytest.mark.parametrize("told", ["normalized", "rest_logprob"])
def test_a_cache_may_tell_that_it_is_not_renormalized(
    told: str, rows: list[Row], byte_level: Tokenizer, digits: Tokenizer,
    back_map: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """A sure teacher's rows sum to 1, too."""
    sure = json.loads(json.dumps(rows))
    for row in sure:
        for logprobs in row["topk_logprobs"][1:]:
            logprobs[:] = [-1e-4, *(-12.0 - i for i in range(1, K))]
        if told == "rest_logprob":
            row["rest_logprob"] = [None] + [-11.0] * (len(row["input_ids"]) - 1)
    about: dict[str, Any] = {"normalized": "false"} if told == "normalized" else {}
    path = teachers.write_neutral(tmp_path / "a.parquet", sure, **about)
    out = tmp_path / "out.parquet"
    projected = xtok.project(path, xtok.pair(digits, byte_level), out, back_map=back_map)
    assert projected.mean_rest is not None


def test_other_tokenizers_are_refused(
    rows: list[Row], byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    about: dict[str, Any] = {"tokenizer": "them", "tokenizer_sha256": "0" * 64}
    path = teachers.write_neutral(tmp_path / "a.parquet", rows, **about)
    out = tmp_path / "out.parquet"
    with pytest.raises(XtokError, match="of them"):
        xtok.project(path, xtok.pair(digits, byte_level), out)
    teachers.write_neutral(path, rows)
    with pytest.raises(XtokError, match="from the teacher to the student") as error:
        xtok.project(path, xtok.pair(byte_level, byte_level), out, back_map=back_map)
    assert error.value.parameter == "back_map"
    other = [{**row, "text": "some other text"} for row in rows]
    teachers.write_neutral(path, other)
    with pytest.raises(XtokError, match=r"row 0: .*text"):
        xtok.project(path, xtok.pair(digits, byte_level), out, back_map=back_map)
    assert [*tmp_path.iterdir()] == [path]


# The text of the rows


def project(
    rows: list[Row], student: Tokenizer, teacher: Tokenizer, path: Path, **options: Any
) -> list[Row]:
    teachers.write_neutral(path / "a.parquet", rows)
    xtok.project(path / "a.parquet", xtok.pair(student, teacher), path / "out.parquet", **options)
    found: list[Row] = pyarrow.parquet.read_table(path / "out.parquet").to_pylist()
    return found


def test_text_and_other_columns_come_along(
    byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    rows = teachers.rows_of(byte_level, TEXTS, K, with_text=True)
    for row in rows:
        row["score"] = [0.5, 1.0]
        row["loss_mask"] = [i > 3 for i in range(len(row["input_ids"]))]
    found = project(rows, digits, byte_level, tmp_path, back_map=back_map)
    for row, given in zip(found, rows, strict=True):
        assert [row[name] for name in ("id", "text", "score")] == [
            given["id"],
            given["text"],
            [0.5, 1],
        ]
        assert row["input_ids"] == digits.encode_batch([given["text"]])[0]
        begin = sum(map(len, map(byte_level.table.__getitem__, given["input_ids"][:4])))
        starts = np.cumsum([0, *map(len, map(digits.table.__getitem__, row["input_ids"][:-1]))])
        assert row["loss_mask"] == (starts >= begin).tolist()
    without = [{name: row[name] for name in ("id", *teachers._NAMES)} for row in rows]
    by_ids = project(without, digits, byte_level, tmp_path, back_map=back_map)
    assert [row["topk_ids"] for row in by_ids] == [row["topk_ids"] for row in found]


CHAT = [
    {"role": "user", "content": "How many steps did it take?"},
    {"role": "assistant", "content": "There were 201 of them in 2012."},
]


def test_conversations_are_rendered_on_both_sides(
    byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    """What the roles wrote has targets; the templates' own text has none."""
    templates = {"teacher_template": "plain", "student_template": "{% for m in messages %}"
                 "<{{ m.role }}>{{ m.content }}\n{% endfor %}"}  # fmt: skip
    theirs = xtok.render(byte_level, CHAT, template="plain")
    ours = xtok.render(digits, CHAT, template=templates["student_template"])
    row = teachers.predicted(theirs.ids.tolist(), byte_level.vocabulary.vocab_size, K)
    chats = [{"id": "a", "messages": CHAT, **row}, {"id": "b", "messages": None, **row}]
    [found, plain] = project(chats, digits, byte_level, tmp_path, back_map=back_map, **templates)
    assert found["input_ids"] == ours.ids.tolist()
    assert found["loss_mask"] == ours.assistant_mask.tolist()
    has_target = [bool(ids) for ids in found["topk_ids"]]
    within = np.zeros(len(ours.ids), bool)
    for span in ours.message_spans:
        assert span.content is not None
        within[slice(*span.content.tokens)] = True
    assert sum(has_target) >= 0.8 * within.sum()
    assert not any(np.array(has_target) & ~within)
    assert plain["input_ids"] == digits.encode_batch([theirs.text])[0]
    cut = {"id": "a", "messages": CHAT, **{name: row[name][:-6] for name in teachers._NAMES}}
    [short] = project([cut], digits, byte_level, tmp_path, back_map=back_map, **templates)
    assert short["input_ids"] == found["input_ids"]
    assert 0 < sum(map(bool, short["topk_ids"])) < sum(has_target)
    chats[0]["input_ids"] = chats[0]["input_ids"][::-1]
    with pytest.raises(XtokError, match="row 0"):
        project(chats, digits, byte_level, tmp_path, back_map=back_map, **templates)


@pytest.mark.parametrize("to", ["neutral", "axolotl", "distillkit", "vllm"])
def test_masks_of_some_rows_alone(
    to: CacheFormat, rows: list[Row], byte_level: Tokenizer, digits: Tokenizer, back_map: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Conversations have one, texts have none: of these, all are targets."""
    theirs = xtok.render(byte_level, CHAT, template="plain")
    row = teachers.predicted(theirs.ids.tolist(), byte_level.vocabulary.vocab_size, K)
    chat = {"id": "chat", "messages": CHAT, "text": None, **row}
    plain = [{"messages": None, **row} for row in rows[:3]]
    path = teachers.write_neutral(tmp_path / "a.parquet", [chat, chat, *plain])
    suffix = "jsonl" if to == "vllm" else "parquet"
    out = tmp_path / "new" / f"out.{suffix}"
    templates: dict[str, Any] = {"student_template": "plain", "teacher_template": "plain"}
    pair, config = xtok.pair(digits, byte_level), ProjectConfig(to=to)
    made = xtok.project(path, pair, out, config, back_map=back_map, **templates)
    assert made.documents == 5
    if to == "neutral":
        back = tmp_path / "back.parquet"
        assert xtok.project(out, pair.reversed, back, **templates).documents == 5


def test_ids_alone_are_read_back_as_conversations(
    byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    """As if their messages were told; where they break off, so does the student's text."""
    templates = {"teacher_template": "chatml", "student_template": "{% for m in messages %}"
                 "<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"}  # fmt: skip
    theirs = xtok.render(byte_level, CHAT, template="chatml")
    row = teachers.predicted(theirs.ids.tolist(), byte_level.vocabulary.vocab_size, K)
    cut = {name: row[name][:-6] for name in teachers._NAMES}
    other = {name: row[name][1:] for name in teachers._NAMES}  # without its first control token
    other["topk_ids"][0], other["topk_logprobs"][0] = [], []
    unknown = [{"id": "a", "messages": None, **one} for one in (row, cut, other)]
    rows = [{"id": "a", "messages": CHAT, **row}, *unknown]
    told, alone, short, spelled = project(
        rows, digits, byte_level, tmp_path, back_map=back_map, **templates
    )
    assert {**alone, "messages": told["messages"]} == told
    size = len(short["input_ids"])
    assert 10 < size < len(told["input_ids"])
    kept = digits.table.tokens()
    text = b"".join(kept[i] for i in told["input_ids"])
    assert text.startswith(b"".join(kept[i] for i in short["input_ids"]))
    assert short["loss_mask"][-1]
    assert b"<user>" not in b"".join(kept[i] for i in spelled["input_ids"])


def test_words_that_the_students_template_drops_are_no_conversation(
    byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    """As of `serve`: ids whose assistant the student would not have are spelled."""
    ids = xtok.render(byte_level, CHAT, template="chatml").ids.tolist()
    row = teachers.predicted(ids, byte_level.vocabulary.vocab_size, K)
    whole = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
    without = "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}"
    texts = []
    for template in (whole, without):
        [found] = project(
            [{"id": "a", **row}], digits, byte_level, tmp_path, back_map=back_map,
            teacher_template="chatml", student_template=template,
        )  # fmt: skip
        texts.append(b"".join(digits.table[i] for i in found["input_ids"]))
        assert ("loss_mask" in found) == (template == whole)
    words = b"There were 201 of them in 2012."
    assert texts[0] == b"<user>How many steps did it take?<assistant>" + words
    assert texts[1].endswith(b"assistant\n" + words + b"\n")


def test_a_teacher_without_its_bos_is_noted(
    byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    bos, size = byte_level.bos_id, byte_level.vocabulary.vocab_size
    assert bos is not None
    [ids] = byte_level.encode_batch([TEXTS[0]])
    with_bos, without = (teachers.predicted(own, size, K) for own in ([bos, *ids], ids))
    for rows, count in (([with_bos] * 2, 0), ([with_bos, without], 1)):
        path = teachers.write_neutral(tmp_path / "a.parquet", rows)
        notes: list[str] = []
        xtok.project(
            path, xtok.pair(digits, byte_level), tmp_path / "o.parquet", back_map=back_map,
            note=notes.append,
        )  # fmt: skip
        assert len(notes) == count
        assert all(
            f"1 of the first 2 rows do not begin with <|begin_of_text|> (id {bos})" in note
            for note in notes
        )


def test_templates_that_write_the_date_are_noted(
    byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    """Before all is projected, and where ids of another day are not those of the messages."""
    dated = "{{ day if day is defined else strftime_now('%d %b %Y') }}{% for m in messages %}"
    dated += "{{ m.content }}\n{% endfor %}"
    theirs = xtok.render(byte_level, CHAT, template=dated, variables={"day": "26 Jul 2024"})
    row = teachers.predicted(theirs.ids.tolist(), byte_level.vocabulary.vocab_size, K)
    templates = {"teacher_template": dated, "student_template": dated}
    chat: Row = {"id": "a", "messages": CHAT, "chat_template_kwargs": {"day": "26 Jul 2024"}, **row}
    notes: list[str] = []
    options: dict[str, Any] = {"back_map": back_map, "note": notes.append, **templates}
    project([chat], digits, byte_level, tmp_path, **options)
    assert not any("date" in note for note in notes)
    del chat["chat_template_kwargs"]
    with pytest.raises(XtokError, match="messages") as error:
        project([chat], digits, byte_level, tmp_path, **options)
    said = "the template writes today's date: set its variable day for the same ids on each day, "
    said += "in a file by each conversation's chat_template_kwargs"
    assert error.value.hint.endswith(f"; {said}")
    assert sum(note.endswith(said) for note in notes) == 1


def test_a_space_before_the_text(
    sentencepiece: Tokenizer, digits: Tokenizer, tmp_path: Path
) -> None:
    """SentencePiece puts one there; the student's tokens begin without it."""
    text = "The lighthouse stands on the last rock"
    [ids] = sentencepiece.encode_batch([text])
    assert sentencepiece.table[ids[0]].startswith(b" ")
    bos = sentencepiece.table.roles["bos"][0]
    row = teachers.predicted([bos, *ids], sentencepiece.vocabulary.vocab_size, K)
    [found] = project([{"id": "a", "text": text, **row}], digits, sentencepiece, tmp_path)
    assert found["input_ids"][-5:] == digits.encode_batch([text])[0][-5:]
    assert sum(map(bool, found["topk_ids"])) > len(found["topk_ids"]) / 2


def test_a_text_that_begins_and_ends_with_special_tokens(
    byte_level: Tokenizer, digits: Tokenizer, tmp_path: Path
) -> None:
    """Its ids are the library's, with a special token around them, or without."""
    eos = byte_level.table.roles["eos"][0]
    name = byte_level.table.control_names[eos]
    [ids] = byte_level.encode_batch([f"{name}The lighthouse{name}"])
    assert ids[0] == ids[-1] == eos
    for own in (ids, [eos, *ids], [eos, *ids, eos]):
        row = teachers.predicted(own, byte_level.vocabulary.vocab_size, K)
        given = {"id": "a", "text": f"{name}The lighthouse{name}", **row}
        [found] = project([given], digits, byte_level, tmp_path)
        tokens = [*map(digits.table.__getitem__, found["input_ids"])]
        assert b"".join(tokens) == b"The lighthouse"
        assert found["input_ids"].count(digits.table.roles["eos"][0]) == own.count(eos)


def test_an_answer_without_tokens(
    byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    """Is an empty document, as in Parquet; whether it is the only one or not."""
    empty = {"id": "a", "choices": [{"prompt_logprobs": [], "prompt_token_ids": []}]}
    full = teachers.vllm_answer(teachers.rows_of(byte_level, TEXTS[:1], K)[0], id="b")
    pair, out = xtok.pair(digits, byte_level), tmp_path / "out.parquet"
    for lines in ([empty], [full, empty]):
        path = teachers.write_lines(tmp_path / "a.jsonl", lines)
        xtok.project(path, pair, out, back_map=back_map)
        found = pyarrow.parquet.read_table(out).to_pylist()
        assert [row["id"] for row in found] == [line["id"] for line in lines]
        assert found[-1]["input_ids"] == found[-1]["topk_ids"] == []


def test_the_config_of_another_cache_is_not_replaced(
    rows: list[Row], byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    """A compressed cache cannot be read without its own; the same one may be written again."""
    path = teachers.write_distillkit(tmp_path / "a.parquet", rows, compressed=True, d=4096)
    config = tmp_path / "compression_config.yaml"
    before = config.read_bytes()
    pair, to = xtok.pair(digits, byte_level), ProjectConfig(to="distillkit")
    with pytest.raises(XtokError, match=str(config)):
        xtok.project(path, pair, tmp_path / "out.parquet", to, back_map=back_map)
    assert config.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"a.parquet", "compression_config.yaml"}
    out = tmp_path / "new" / "out.parquet"
    for _ in range(2):
        xtok.project(path, pair, out, to, back_map=back_map)
    assert {p.name for p in out.parent.iterdir()} == {"out.parquet", "compression_config.yaml"}


def test_the_first_token_has_no_prediction(
    sentencepiece: Tokenizer, ranks: Tokenizer, tmp_path: Path
) -> None:
    """Also where the teacher has a BOS before it, and the student has none."""
    bos = sentencepiece.table.roles["bos"][0]
    assert "bos" not in ranks.table.roles
    row = teachers.predicted(
        [bos, *sentencepiece.segment("The lighthouse")], sentencepiece.vocabulary.vocab_size, K
    )
    [found] = project([{"id": "a", **row}], ranks, sentencepiece, tmp_path)
    assert found["topk_ids"][0] == []
    assert found["rest_logprob"][0] is None
    assert any(found["topk_ids"])


def test_what_the_text_costs(
    rows: list[Row], byte_level: Tokenizer, digits: Tokenizer, back_map: Path, tmp_path: Path
) -> None:
    """−log₂ of its own tokens, a byte."""
    path = teachers.write_neutral(tmp_path / "a.parquet", rows)
    pair = xtok.pair(digits, byte_level)
    found = xtok.project(path, pair, tmp_path / "o.parquet", back_map=back_map)
    nats = num_bytes = 0.0
    for row in rows:
        for token, ids, logprobs in list(zip(*map(row.get, teachers._NAMES), strict=True))[1:]:
            nats -= dict(zip(ids, logprobs, strict=True))[token]
            num_bytes += len(byte_level.table[token])
    assert found.teacher_bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes)
    assert not found.teacher_is_bound
    assert found.notes == ()
