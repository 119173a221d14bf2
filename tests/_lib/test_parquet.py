"""Parquet of other programs: one set of types, and a limit on memory before it is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from checks import error_of
from command_lines import run_python
from conftest import SetNumber

from xtok._lib import parquet
from xtok._lib.parquet import ParquetTable

STRING, LARGE, INT = pyarrow.string(), pyarrow.large_string(), pyarrow.int32()


def table_of(path: Path, **columns: Any) -> ParquetTable:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd")
    return ParquetTable(path)


def batches(table: ParquetTable, **options: Any) -> list[Any]:
    return [batch for _, batch in table.batches(range(table.num_row_groups), **options)]


WORDS = pyarrow.array(["a", None, "bc"])
NUMBERS = [[1, 2], None, []]
COLUMNS = {
    "string_view": (WORDS.cast(pyarrow.string_view()), STRING),
    "large_string": (WORDS.cast(pyarrow.large_string()), STRING),
    "dictionary": (WORDS.dictionary_encode(), STRING),
    "json": (pyarrow.array(["1", None, "2"], pyarrow.json_()), STRING),
    "large_binary": (pyarrow.array([b"a", None, b"b"], pyarrow.large_binary()), pyarrow.binary()),
    "list_view": (pyarrow.array(NUMBERS, pyarrow.list_view(INT)), pyarrow.list_(INT)),
    "large_list": (pyarrow.array(NUMBERS, pyarrow.large_list(INT)), pyarrow.list_(INT)),
    "views of views": (
        pyarrow.array([[["a"], []], None, [["b"]]], pyarrow.list_view(pyarrow.list_view(STRING))),
        pyarrow.list_(pyarrow.list_(STRING)),
    ),
    "fixed": (
        pyarrow.array([[1, 2], None, [3, 4]], pyarrow.list_(INT, 2)), pyarrow.list_(INT, 2),
    ),
    "struct": (
        pyarrow.array([{"a": "x"}, None, {"a": None}], pyarrow.struct({"a": LARGE})),
        pyarrow.struct({"a": STRING}),
    ),
    "map": (
        pyarrow.array([[("a", "x")], None, []], pyarrow.map_(STRING, pyarrow.large_string())),
        pyarrow.map_(STRING, STRING),
    ),
    "number": (pyarrow.array([1, None, 3], INT), INT),
}  # fmt: skip


def test_a_row_group_without_columns_has_no_batches(tmp_path: Path) -> None:
    table = table_of(tmp_path / "a.parquet")
    assert table.num_row_groups == 1
    assert batches(table) == batches(table, max_values=10) == []


@pytest.mark.parametrize("kind", COLUMNS)
def test_types_are_cast_once(kind: str, tmp_path: Path) -> None:
    column, expected = COLUMNS[kind]
    table = table_of(tmp_path / "a.parquet", a=column)
    assert table.schema.field("a").type == expected
    [batch] = batches(table)
    assert batch.schema.field("a").type == expected
    batch.validate(full=True)
    assert batch.column(0).to_pylist() == column.to_pylist()
    assert batch.slice(2).column(0).to_pylist() == column.to_pylist()[2:]


def dictionary(rows: int, text: str) -> Any:
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, INT), [text])


def test_a_row_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_row_limit: SetNumber
) -> None:
    table = table_of(tmp_path / "a.parquet", a=["b", "c" * 2000, "d"], b=[1, 2, 3])
    assert [len(batch) for batch in batches(table)] == [3]
    monkeypatch.setattr(parquet, "BATCH_BYTES", 1000)
    assert [len(batch) for batch in batches(table)] == [1, 1, 1]
    set_row_limit(2000)
    for nested in (
        pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 9], INT), dictionary(9, "a" * 300)),
        pyarrow.MapArray.from_arrays(
            pyarrow.array([0, 1, 9], INT), [*"abcdefghi"], dictionary(9, "a" * 300)
        ),
    ):
        table = table_of(tmp_path / "a.parquet", a=nested)
        problem = error_of(lambda table=table: batches(table))  # type: ignore[misc]
        assert problem == f"{tmp_path / 'a.parquet'}: row 1 is larger than 0 MiB"


# each column needs 1 or 2 GB in memory; the second item is the expected result
BOMBS: dict[str, tuple[Callable[[], Any], str]] = {
    "one text in 16 rows": (lambda: dictionary(16, "a" * (60 << 20)), "16"),
    "a list of one text": (
        lambda: pyarrow.ListArray.from_arrays(
            pyarrow.array([0, 2000], INT), dictionary(2000, "a" * (1 << 20))
        ),
        "row 0 is larger than 512 MiB",
    ),
}
READ = """
import resource, sys
from pathlib import Path
from xtok._lib.parquet import ParquetTable
from xtok.errors import XtokError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
table = ParquetTable(Path(sys.argv[1]))
try:
    print(sum(len(batch) for _, batch in table.batches([0])), end="")
except XtokError as error:
    print(error.message.partition(": ")[2], end="")
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 6e5  # kB
"""


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_does_not_fill_the_memory(bomb: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    make, result = BOMBS[bomb]
    pyarrow.parquet.write_table(pyarrow.table({"a": make()}), path, compression="zstd")
    assert path.stat().st_size < 30_000
    assert run_python(READ, path).stdout == result


def test_a_page_has_a_limit(tmp_path: Path, set_row_limit: SetNumber) -> None:
    set_row_limit(1 << 20)
    table = table_of(tmp_path / "a.parquet", a=["b" * (3 << 20)])
    assert error_of(lambda: batches(table)) == (
        f"{tmp_path / 'a.parquet'}: a page expands to 3 MiB; the limit is 1 MiB"
    )


def test_no_byte_of_a_footer_or_page_raises_another_error(tmp_path: Path) -> None:
    """For any declaration in the file, it is read, or an `XtokError` names the file."""
    path = tmp_path / "a.parquet"
    table_of(path, a=[["b"], ["c", "d"]], b=[1, 2])
    content = path.read_bytes()
    result = run_python(FLIPS, path)
    assert result.stdout == f"{len(content) - 8}", result.stderr


FLIPS = """
import resource, sys
from pathlib import Path
from xtok._lib.opening import reading
from xtok._lib.parquet import ParquetTable
from xtok.errors import XtokError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path = Path(sys.argv[1])
whole, count = path.read_bytes(), 0
for offset in range(len(whole) - 8):
    for bit in (1, 64, 128):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ bit]) + whole[offset + 1 :])
        try:
            with reading(path):
                table = ParquetTable(path)
                list(table.batches(range(table.num_row_groups)))
        except XtokError:
            pass
    count += 1
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2e5  # kB
print(count, end="")
"""
