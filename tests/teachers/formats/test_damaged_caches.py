"""Random and damaged caches are read exactly or rejected with an `XtokError`."""

from __future__ import annotations

import copy
import datetime
import decimal
import gzip
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import stored_teachers as teachers
import yaml
from checks import error_of
from conftest import SetNumber
from forked import Forks
from stored_teachers import Row, read_documents, write_distillkit

from xtok.errors import XtokError
from xtok.maps.projection_map import ProjectionMap
from xtok.teachers.formats import neutral, vllm
from xtok.teachers.formats.caches import open_cache, read_cache
from xtok.teachers.stored_texts import project_documents
from xtok.teachers.translator import Translator
from xtok.tokenizers import Tokenizer
from xtok.tokenizers.pairs import Pair

TEXTS = teachers.TEXTS[:3]
K = 4
RUNS = 100

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 300, 2**31, 2**32 + 5, 2**63, 2**70, -(2**70)),
    *(1.0, 1.5, -0.5, math.nan, math.inf, -math.inf, 1e300, -1e300),
    *("", "x", "5", "9" * 20, " 5", "1_0", "\ud800", "a\x00b", "plain", b"", "٣"),
    *([], {}, [[]], [None], [5], [[5]], ["5"], [True], {"logprob": -1}, {"5": {"logprob": -1.0}}),
    *([{}], [{"role": "user"}], [{"role": "user", "content": "\ud800"}], ["a", "b"], "[" * 500),
]


@pytest.fixture(scope="module")
def rows(byte_level: Tokenizer) -> list[Row]:
    return teachers.teacher_rows(byte_level, TEXTS, K)


@pytest.fixture(scope="module")
def translator(back: Pair, back_map: Path) -> Translator:
    return Translator(back, ProjectionMap.load(back_map), templates=("plain", "plain"))


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of each item in a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from nodes(value[key])


def mutate(value: Any, generator: random.Random) -> None:
    """Replace, remove or rename an item in a JSON value."""
    holder, key = generator.choice([*nodes(value)])
    other = copy.deepcopy(generator.choice(VALUES))
    other = "bytes" if isinstance(other, bytes) else other
    what = generator.randrange(8)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, dict):
        holder[str(other)] = holder.pop(key)
    elif what == 2 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[key] = other


def predictions(path: Path, tokenizer: Tokenizer, translator: Translator) -> list[Row] | None:
    """Read and project a cache; return its rows in the neutral format, or None for an error."""
    try:
        parts = read_documents(path, tokenizer)
        for rows in parts:
            project_documents(translator, rows, K)
    except XtokError as error:
        is_one_line = str(path.parent) in error.message and "\n" not in str(error)
        if not is_one_line:
            raise
        return None
    return [row for rows in parts for row in neutral.table(rows).to_pylist()]


def equal_rows(neutral_row: Row, ids: Any, rows: Any) -> bool:
    """Return whether a neutral row has these ids, and these log-probabilities of candidates."""
    theirs = [
        dict(zip(*pair, strict=True))
        for pair in zip(neutral_row["topk_ids"], neutral_row["topk_logprobs"], strict=True)
    ]
    known = [{i: lp for i, lp in row.items() if lp is not None and lp >= -1e3} for row in rows]
    if known and ids and known[0] == {ids[0]: 0.0}:  # nothing predicts a first token
        known[0] = {}
    ours = [{i: float(np.float32(lp)) for i, lp in row.items()} for row in known]
    return {type(i) for i in ids} <= {int} and (neutral_row["input_ids"], theirs) == (ids, ours)


def read_response(response: Row) -> tuple[Any, Any]:
    """Return the ids and the rows of vLLM's or SGLang's response."""
    if "meta_info" in response:
        info = response["meta_info"]
        pairs = zip(info["input_token_logprobs"], info["input_top_logprobs"], strict=True)
        rows = []
        for own, top in pairs:
            rows.append({i: lp for lp, i, *_ in top or ()})
            if top and own[0] is not None:
                rows[-1].setdefault(own[1], own[0])
        return [own[1] for own in info["input_token_logprobs"]], rows
    response = {**response, **response.get("choices", [{}])[0]}
    rows = [
        {
            int(i): entry["logprob"] if isinstance(entry, dict) else entry
            for i, entry in (row or {}).items()
        }
        for row in response["prompt_logprobs"]
    ]
    return response.get("prompt_token_ids", response.get("input_ids", response.get("prompt"))), rows


READ_ANSWERS = {
    "vllm": {
        4, 14, 16, 22, 23, 26, 28, 31, 34, 41, 47, 61, 62, 74, 77, 79, 82, 83, 88, 89, 97,
        98,
    },
    "sglang": {
        13, 22, 23, 28, 29, 32, 34, 37, 43, 44, 52, 56, 59, 68, 73, 86, 89, 92, 98,
    },
}  # fmt: skip
"""The seeds of responses that are valid after their change, without a wrong byte."""


@pytest.mark.parametrize("seed", range(RUNS))
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_changed_responses_are_read_exactly_or_rejected(
    kind: str, seed: int, byte_level: Tokenizer, translator: Translator, tmp_path: Path
) -> None:
    """A value is replaced, renamed, removed or repeated; some files also get a wrong byte."""
    to_response = getattr(teachers, f"{kind}_response")
    path = tmp_path / "a.jsonl"
    generator = random.Random(seed)
    rows = teachers.teacher_rows(byte_level, TEXTS, K, with_text=seed % 2 == 0)
    values = [to_response(row) for row in rows]
    if seed % 3 == 0:
        values[1]["messages"] = copy.deepcopy(CHAT)
    mutate(values[1], generator)
    data = "".join(json.dumps(value) + "\n" for value in values).encode()
    has_wrong_byte = seed % 5 == 0
    if has_wrong_byte:
        damaged = bytearray(data)
        damaged[generator.randrange(len(data))] = generator.randrange(256)
        data = bytes(damaged)
    path.write_bytes(data)
    read_rows = predictions(path, byte_level, translator)
    # The effect of a wrong byte depends on the last digits of floats.
    assert has_wrong_byte or (read_rows is not None) == (seed in READ_ANSWERS[kind])
    if read_rows is not None:
        written = [read_response(json.loads(line)) for line in data.splitlines()]
        for row, ids_and_rows in zip(read_rows, written, strict=True):
            assert equal_rows(row, *ids_and_rows)


INTS, FLOATS = pyarrow.list_(pyarrow.int64()), pyarrow.list_(pyarrow.float64())
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
COLUMNS: list[Any] = [
    ["x"] * 3, [5] * 3, [None] * 3, [True] * 3, [b"\xff"] * 3, [1.5] * 3, [{"a": 1}] * 3,
    [["5"]] * 3, [[5]] * 3, [[b"x"]] * 3, [[{"a": 1}]] * 3, [[[{"a": 1}]]] * 3, [[["5"]]] * 3,
    [[[5]]] * 3, [[[1.5]]] * 3, [[[[5]]]] * 3, [[True]] * 3, [[None]] * 3, [[[None]]] * 3, [[]] * 3,
    [[[]]] * 3, [[datetime.date(2026, 1, 1)]] * 3, [datetime.datetime(2026, 1, 1)] * 3,
    [[decimal.Decimal("1.5")]] * 3, [["a", "b"]] * 3, ["[]"] * 3, ["[" * 5000] * 3,
    [CHAT] * 3, [[{"role": "user", "content": None}]] * 3,
    pyarrow.array([b"\xff\xfe"] * 3).view(pyarrow.string()),
    pyarrow.array([[(1, 2)]] * 3, pyarrow.map_(pyarrow.int32(), pyarrow.int32())),
    pyarrow.array(["a", "b", "a"]).dictionary_encode(),
    pyarrow.array([[1, 2]] * 3, pyarrow.list_(pyarrow.int32(), 2)),
]  # fmt: skip
NAMES = (
    *("input_ids", "topk_ids", "topk_logprobs", "rest_logprob", "realized_logprob", "loss_mask"),
    *("labels", "text", "messages", "tools", "chat_template_kwargs", "id", "topk_ids"),
)


def changed_column(rows: list[Row], name: str, generator: random.Random) -> Any:
    """Return a column after one of its numbers is changed, in 64 bits."""
    column = copy.deepcopy([row.get(name, list(range(3))) for row in rows])
    holder = column[1]
    while isinstance(holder[-1], list):
        holder = holder[-1]
    number = generator.choice([value for value in VALUES if isinstance(value, int | float | None)])
    holder[-1] = holder[-1] + 2**32 if generator.random() < 0.3 else number
    is_ids = all(isinstance(value, int | None) for value in holder)
    depth = pyarrow.list_ if name.startswith("topk_") else lambda kind: kind
    return pyarrow.array(column, depth(INTS if is_ids else FLOATS))


READ_TABLES = {
    19, 26, 27, 37, 38, 53, 58, 62, 69, 74,
}  # fmt: skip
"""The seeds of tables that are valid after their change, without a wrong byte."""


@pytest.mark.parametrize("seed", range(RUNS))
def test_changed_columns_are_read_exactly_or_rejected(
    seed: int, rows: list[Row], byte_level: Tokenizer, translator: Translator, tmp_path: Path
) -> None:
    """A column gets another type or another number; some files also get a wrong byte."""
    path = tmp_path / "a.parquet"
    generator = random.Random(seed)
    table = {name: pyarrow.array([row[name] for row in rows]) for name in rows[0]}
    name = generator.choice(NAMES)
    if seed % 3 == 0:
        try:
            table[name] = changed_column(rows, name, generator)
        except (OverflowError, pyarrow.ArrowException, TypeError):
            return  # Arrow cannot represent this column
    else:
        column = generator.choice(COLUMNS)
        table[name] = pyarrow.array(column) if isinstance(column, list) else column
    names = [*table]
    if seed % 11 == 0:  # two columns with the same name
        names[generator.randrange(len(names))] = name
    about = {b"k": b"\xff"} if seed % 7 == 0 else {}
    schema = pyarrow.Table.from_arrays([*table.values()], names).replace_schema_metadata(about)
    pyarrow.parquet.write_table(schema, path, row_group_size=2)
    has_wrong_byte = seed % 5 == 0
    if has_wrong_byte:
        data = bytearray(path.read_bytes())
        data[generator.randrange(len(data))] = generator.randrange(256)
        path.write_bytes(data)
    read_rows = predictions(path, byte_level, translator)
    # The effect of a wrong byte depends on the version of pyarrow.
    assert has_wrong_byte or (read_rows is not None) == (seed in READ_TABLES)
    if read_rows is not None:
        plain_rows = read_rows if has_wrong_byte else schema.to_pylist()
        written = [(row["input_ids"], read_neutral(row)) for row in plain_rows]
        for row, ids_and_rows in zip(read_rows, written, strict=True):
            assert equal_rows(row, *ids_and_rows)


def read_neutral(row: Row) -> list[dict[int, float]]:
    pairs = zip(row["topk_ids"], row["topk_logprobs"], strict=True)
    return [dict(zip(ids or (), lps or (), strict=True)) for ids, lps in pairs]


CONFIG = {"d": 1280, "k": K, "exact_k": K, "exact_dtype": "float32", "residual_bins": []}


def test_changed_configs_are_read_exactly_or_rejected(
    rows: list[Row], byte_level: Tokenizer, translator: Translator, tmp_path: Path
) -> None:
    """Each field of DistillKit's config gets each value, including terms that only NumPy has."""
    path = write_distillkit(tmp_path / "a.parquet", rows, compressed=True, d=1280, k=K)
    plain_rows = [{name: row[name] for name in teachers.NAMES} for row in rows]
    bins = {"scale_dtype": "float32", "element_bits": 4, "num_elements": 2}
    others: list[Any] = [
        *(["sqrt"], ["fromfile"], ["exp", 0], [["sqrt"]], [-1], [True], [1e9], [17], "float16"),
        *([{**bins, **more}] for more in ({}, {"element_bits": 64}, {"scale_dtype": "int8"})),
        *([{}], [bins, 5], 2**40, 3, "yes", [bins] * 2),
    ]
    values = [value for value in [*VALUES, *others] if not isinstance(value, bytes)]
    fields = ("polynomial_terms", "delta_encoding", "normalize_t", "term_dtype", "error_diffusion")
    refused = 0
    for name in (*CONFIG, *fields, "unknown"):
        for value in values:
            config = {**CONFIG, name: value}
            if name in ("polynomial_terms", "residual_bins"):
                config["exact_k"] = 2
            text = yaml.safe_dump(config) if value != "\ud800" else "d: \ud800"
            (tmp_path / "compression_config.yaml").write_text(text, errors="surrogatepass")
            read_rows = predictions(path, byte_level, translator)
            refused += read_rows is None
            if read_rows and config["exact_k"] == K:
                stored = [{name: row[name] for name in teachers.NAMES} for row in read_rows]
                assert stored == plain_rows, (name, value)
    assert refused > 300


# Regression tests: earlier versions accepted these files, or raised a traceback


def message_of(path: Path, tokenizer: Tokenizer) -> str:
    with pytest.raises(XtokError) as error:
        read_documents(path, tokenizer)
    assert error.value.message.startswith(str(path))
    return error.value.message.removeprefix(str(path))


def scored(row: str, ids: str) -> str:
    return f'{{"prompt_logprobs": [null{row}], "prompt_token_ids": {ids}}}'


@pytest.mark.parametrize(
    ("line", "word"),
    [
        *((text, text) for text in ("null", "[]", "5")),
        (scored(', {"4": {"logprob": -1}, "4": {"logprob": -2}}', "[4, 4]"), "twice"),
        ('{"a": "\\ud800"}', "utf-8"),
        (
            '{"error": {"message": "context is\\n4,096 tokens", "code": 400}, "text": "a"}',
            "context is 4,096 tokens",
        ),
        ('{"object": "error", "message": "no"}', "is an error: no"),
        (scored("", '"a"'), "prompt_token_ids"),
        (scored(', {"99999999999999999999": {"logprob": -1}}', "[4, 5]"), "9, expected -21474"),
    ],
)
def test_errors_name_the_line_and_the_cause(
    line: str, word: str, rows: list[Row], byte_level: Tokenizer, tmp_path: Path
) -> None:
    """Errors contain the line number; blank lines count as well."""
    path = tmp_path / "a.jsonl"
    path.write_text(f"\n{json.dumps(teachers.vllm_response(rows[0]))}\n\n{line}\n")
    message = message_of(path, byte_level)
    assert message.startswith((", line 4: ", ", line 4, position 1: "))
    assert word in message
    path.write_text(f"{line}\n")
    assert message_of(path, byte_level).startswith((message.replace("4", "1", 1), ": no Parquet"))


def test_a_line_without_an_end_is_limited(
    byte_level: Tokenizer, tmp_path: Path, set_row_limit: SetNumber
) -> None:
    """A compressed file without line ends does not fill the memory."""
    set_row_limit(1 << 20)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * (1 << 24)))
    assert "line 1: JSON value is larger than 1 MiB" in message_of(path, byte_level)


def test_responses_without_candidates_are_worked_on_a_few_at_a_time(tmp_path: Path) -> None:
    response = {"prompt_logprobs": [None], "prompt_token_ids": [5]}
    path = teachers.write_lines(tmp_path / "a.jsonl", [response] * 1000)
    cache = open_cache(path)
    [shard] = cache.shards
    pieces = [rows for rows, _ in read_cache(cache, shard, 100)]
    assert [len(rows.locations) for rows in pieces] == [100] * 10


FLIPS = """
import sys
from pathlib import Path
from xtok.errors import XtokError
from xtok.teachers.formats.caches import open_cache, read_cache
path = Path(sys.argv[1])
data = path.read_bytes()
for offset in range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data) - 8):
    path.write_bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :])
    try:
        cache = open_cache(path)
        list(list(read_cache(cache, shard)) for shard in cache.shards)
    except XtokError:
        pass
"""


def test_a_damaged_footer_does_not_end_the_process(
    rows: list[Row], tmp_path: Path, forks: Forks
) -> None:
    """Under pyarrow 26, damaged metadata of a column can crash the process."""
    path = teachers.write_neutral(tmp_path / "a.parquet", rows[:1])
    result = forks.run(["-c", FLIPS, path], tmp_path, program="python")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("ends", [[2, 2, 3], [0, 2, 3]])
def test_flat_rows_of_vllm_that_overlap_are_refused(ends: list[int]) -> None:
    rows: Row = {"start_indices": [0, 1, 2], "token_ids": [1, 2, 3], "logprobs": [-1.0, -2.0, -3.0]}
    response: Row = {"prompt_token_ids": [5, 1, 2]}
    response["prompt_logprobs"] = {**rows, "end_indices": [1, 2, 3]}
    assert vllm.read(response, "a.jsonl").ids.tolist() == [1, 2, 3]
    response["prompt_logprobs"] = {**rows, "end_indices": ends}
    message = "a.jsonl, position 0: prompt_logprobs is not in vLLM's format"
    assert error_of(lambda: vllm.read(response, "a.jsonl")).startswith(message)
