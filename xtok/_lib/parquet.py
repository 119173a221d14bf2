"""Read Parquet files of other programs, with limited memory.

28 kB of Parquet can expand to 7 GB, so this module checks the size of a page before it decompresses
the page. Strings within lists stay dictionary-encoded until the size of the row is known. pyarrow's
column metadata is not used, because pyarrow 26 aborts the process if the footer is damaged.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from xtok._lib.opening import MAX_ROW_BYTES, compression_of, need
from xtok.errors import MALFORMED, XtokError

BATCH_BYTES = 1 << 28
_TEXTS = ("STRING", "NONE", "ENUM", "JSON", "BSON")  # logical types read with `read_dictionary`


class ParquetTable:
    """An open Parquet file.

    All string types are cast to `string`, and all list types to `list`, except fixed-size lists.
    """

    def __init__(self, path: Path) -> None:
        parquet, self._arrow = need("pyarrow.parquet", path), need("pyarrow", path)
        self._path = path
        with path.open("rb") as raw:
            if compression := compression_of(raw, path):
                raise XtokError(
                    f"{path} is a Parquet file that is compressed with {compression}",
                    hint="decompress the file first; Parquet compresses its own pages",
                )
        columns = parquet.ParquetFile(self._file()).schema
        leaves = [columns.column(i) for i in range(len(columns))]
        nested = [x for x in leaves if x.physical_type == "BYTE_ARRAY" and x.max_repetition_level]
        self._parquet = parquet.ParquetFile(
            self._file(),
            read_dictionary=[x.path for x in nested if x.logical_type.type in _TEXTS],
            buffer_size=1 << 20,  # read the columns of a row group in blocks of 1 MiB
            page_checksum_verification=True,
        )
        stored = self._parquet.schema_arrow
        fields = [field.with_type(self._cast_type(field.type)) for field in stored]
        self.schema = self._arrow.schema(fields, stored.metadata)
        self.num_row_groups: int = self._parquet.num_row_groups

    def _file(self) -> Any:
        return self._arrow.OSFile(os.fsencode(self._path))  # pyarrow encodes a str as UTF-8

    def _cast_type(self, kind: Any) -> Any:
        """Replace variants of types by the usual types, for example `large_string` by `string`."""
        arrow, types = self._arrow, self._arrow.types
        if types.is_dictionary(kind):
            return self._cast_type(kind.value_type)
        if isinstance(kind, arrow.BaseExtensionType):
            return self._cast_type(kind.storage_type)
        if types.is_large_string(kind) or types.is_string_view(kind):
            return arrow.string()
        if types.is_large_binary(kind) or types.is_binary_view(kind):
            return arrow.binary()
        if types.is_map(kind):
            return arrow.map_(self._cast_type(kind.key_type), self._cast_type(kind.item_type))
        if types.is_struct(kind):
            return arrow.struct([f.with_type(self._cast_type(f.type)) for f in kind])
        if types.is_nested(kind) and not types.is_union(kind):
            item = kind.value_field.with_type(self._cast_type(kind.value_type))
            return arrow.list_(item, kind.list_size if types.is_fixed_size_list(kind) else -1)
        return kind

    def num_rows(self, group: int) -> int:
        """Return the number of rows in a row group."""
        return int(self._parquet.metadata.row_group(group).num_rows)

    def batches(
        self,
        groups: Sequence[int],
        columns: Collection[str] | None = None,
        *,
        max_values: int | None = None,
    ) -> Iterator[tuple[list[str], Any]]:
        """Yield batches: the locations of the rows, such as `FILE, row 3`, and the record batch.

        A batch has up to 256 rows. If `max_values` is given, the number of rows is chosen so that
        the column with the most values has approximately `max_values` values. If a row is larger
        than `MAX_ROW_BYTES`, an error is raised.
        """
        row = sum(map(self.num_rows, range(groups[0]))) if groups else 0
        for group in groups:
            num_rows = 256
            if max_values is not None:
                longest = max((int(c[5]) for c in self._chunks(group, None)), default=1)
                num_rows = self.num_rows(group) * max_values // max(1, longest)
            largest = max((self._page_bytes(c) for c in self._chunks(group, columns)), default=1)
            for batch in self._parquet.iter_batches(
                max(1, min(num_rows, BATCH_BYTES // max(1, largest))),
                row_groups=[group],
                columns=columns if columns is None else list(columns),
                use_threads=False,
            ):
                for part in self._cast(batch, row):
                    yield [f"{self._path}, row {row + i}" for i in range(len(part))], part
                    row += len(part)

    def _cast(self, batch: Any, row: int) -> Iterator[Any]:
        size = sum(map(self._num_bytes, batch.columns))
        if len(batch) == 1 and size > MAX_ROW_BYTES:
            problem = f"row {row} is larger than {MAX_ROW_BYTES >> 20} MiB"
            raise self._error(problem, "split the row into several")
        if len(batch) > 1 and size > BATCH_BYTES:
            half = len(batch) // 2
            yield from self._cast(batch.slice(0, half), row)
            yield from self._cast(batch.slice(half), row + half)
            return
        fields = [self.schema.field(name) for name in batch.schema.names]
        arrays = [
            self._as_list(array).cast(field.type)
            for array, field in zip(batch.columns, fields, strict=True)
        ]
        yield self._arrow.RecordBatch.from_arrays(
            arrays, schema=self._arrow.schema(fields, self.schema.metadata)
        )

    def _as_list(self, array: Any) -> Any:
        # Workaround: pyarrow 26 casts a list view to an array that lacks the last offset.
        types = self._arrow.types
        if not (types.is_list_view(array.type) or types.is_large_list_view(array.type)):
            return array
        compute = need("pyarrow.compute", self._path)
        ends = compute.cumulative_sum(compute.list_value_length(array).fill_null(0).cast("int32"))
        offsets = self._arrow.concat_arrays([self._arrow.array([0], "int32"), ends])
        values = self._as_list(array.flatten())
        return self._arrow.ListArray.from_arrays(offsets, values, mask=array.is_null())

    def _num_bytes(self, array: Any) -> int:
        types = self._arrow.types
        if types.is_dictionary(array.type):
            lengths = need("pyarrow.compute", self._path).binary_length(array.dictionary)
            return int(lengths.take(array.indices).sum().as_py() or 0) + 4 * len(array)
        if types.is_struct(array.type):
            return sum(map(self._num_bytes, array.flatten()))
        if types.is_map(array.type):
            start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
            parts = (array.keys, array.items)
            return sum(self._num_bytes(part.slice(start, end - start)) for part in parts)
        if types.is_nested(array.type) and not types.is_union(array.type):
            return self._num_bytes(array.flatten()) + 4 * len(array)
        return int(array.nbytes)

    def _chunks(self, group: int, columns: Collection[str] | None) -> list[dict[int, Any]]:
        """Return the `ColumnMetaData` of the columns of a row group."""
        status = self._path.stat()
        try:
            parts = _row_groups(self._path, status.st_size, status.st_mtime_ns)[group][1]
            chunks = [part[3] for part in parts]
            if not all(isinstance(chunk[i], int) for chunk in chunks for i in (5, 7, 9)):
                raise ValueError
            return [c for c in chunks if columns is None or c[3][0].decode() in columns]
        except MALFORMED as error:
            raise self._damage_error("its footer") from error

    def _page_bytes(self, chunk: dict[int, Any]) -> int:
        """Return the decompressed size of a column chunk's largest page."""
        largest = 0
        try:
            at = chunk[9]
            if 0 < chunk.get(11, 0) < at:  # page of the dictionary
                at = chunk[11]
            stop = at + chunk[7] * (chunk[5] > 0)
            with _map_file(self._path) as data:
                while 0 <= at < stop:
                    header, at = _decode(data, at)
                    num_values = max(header.get(i, {1: 0})[1] for i in (5, 7, 8))
                    if min(header[2], header[3]) < 0:
                        raise ValueError
                    largest, at = max(largest, header[2], 4 * num_values), at + header[3]
        except MALFORMED as error:
            raise self._damage_error("the header of a page") from error
        if largest > MAX_ROW_BYTES:
            limit = f"the limit is {MAX_ROW_BYTES >> 20} MiB"
            problem = f"a page expands to {largest >> 20:,} MiB; {limit}"
            raise self._error(problem, "write the file with smaller pages")
        return largest

    def _damage_error(self, part: str) -> XtokError:
        problem = f"{self._path} cannot be read: {part} is damaged"
        return XtokError(problem, hint="download the file again")

    def _error(self, problem: str, hint: str) -> XtokError:
        return XtokError(f"{self._path}: {problem}", hint=hint)


def python_values(values: Any, locations: Sequence[object]) -> list[Any]:
    """Return an array as a list. Maps become dicts, and null fields of structs are omitted.

    Arrow stores a missing field of a struct as null.
    """
    try:
        return _without_null_fields(values.to_pylist(maps_as_pydicts="strict"), values)
    except UnicodeDecodeError:
        raise
    except (KeyError, ValueError) as error:  # pyarrow raises `ValueError` for a map in a struct
        if len(values) == 1:
            problem = f"{locations[0]}: a Parquet map contains a key twice"
            raise XtokError(problem, hint="write each key of a map only once") from error
    rows = [(values[i : i + 1], locations[i : i + 1]) for i in range(len(values))]
    return [value for row in rows for value in python_values(*row)]


def _without_null_fields(rows: list[Any], values: Any) -> list[Any]:
    """Remove the null fields of structs at all levels."""
    types = need("pyarrow.types", "the file")

    def convert(value: Any, kind: Any) -> Any:
        if value is None or not types.is_nested(kind) or types.is_union(kind):
            return value
        if types.is_struct(kind):
            fields = ((field, value[field.name]) for field in kind)
            return {f.name: convert(item, f.type) for f, item in fields if item is not None}
        if types.is_map(kind):
            return {key: convert(item, kind.item_type) for key, item in value.items()}
        if not types.is_nested(kind.value_type):  # a long list of numbers
            return value
        return [convert(item, kind.value_type) for item in value]

    return [convert(row, values.type) for row in rows]


def parquet_writer(file: Any, schema: Any, **options: Any) -> Any:
    """Return a Parquet writer that stores a checksum of each page."""
    return need("pyarrow.parquet", "the output").ParquetWriter(
        file, schema, write_page_checksum=True, **options
    )


# Reader of Parquet's metadata, which is stored in Thrift's compact protocol. The functions return a
# struct as a dict from field numbers to values. The numbers are defined in
# https://github.com/apache/parquet-format/blob/master/src/main/thrift


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@lru_cache(maxsize=4)
def _row_groups(path: Path, size: int, changed: int) -> list[dict[int, Any]]:
    # `size` and `changed` make the cache read a changed file again.
    with _map_file(path) as data:
        start = size - 8 - int.from_bytes(data[size - 8 : size - 4], "little")
        groups: list[dict[int, Any]] = _decode(data, start)[0][4]
        return groups


_SIZES = {1: 0, 2: 0, 3: 1, 7: 8}  # types to skip and their bytes: True, False, byte, double


def _decode(data: Any, at: int, kind: int = 12) -> tuple[Any, int]:
    """Decode the value at an offset. The default `kind` is a struct.

    Returns:
        the value, and the offset of the byte after the value.
    """
    if kind in _SIZES:
        return None, at + _SIZES[kind]
    if kind in (4, 5, 6):
        number, at = _varint(data, at)
        return (number >> 1) ^ -(number & 1), at
    if kind == 8:
        size, at = _varint(data, at)
        return data[at : at + size], at + size
    if kind in (9, 10):
        size, item = data[at] >> 4, data[at] & 15
        size, at = _varint(data, at + 1) if size == 15 else (size, at + 1)
        items = []
        for _ in range(size):
            value, at = _decode(data, at + (item in (1, 2)), item)
            items.append(value)
        return items, at
    if kind != 12:
        raise ValueError(kind)
    fields: dict[int, Any] = {}
    field = 0
    while head := data[at]:
        step, at = (head >> 4, at + 1) if head >> 4 else _decode(data, at + 1, 4)
        field += step
        fields[field], at = _decode(data, at, head & 15)
    return fields, at + 1


def _varint(data: Any, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
