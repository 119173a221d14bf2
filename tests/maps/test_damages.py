"""Damaged, hostile and foreign map files: errors that name the damage and need little memory."""

from __future__ import annotations

import io
import json
import os
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from inspect import getsource, signature
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_lines import run_python
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_maps import FOREIGN, TINY, Change, changed_file, edited, load_bytes, pt_bytes
from make_tokenizers import byte_ranks
from safetensors.torch import save

import xtok
from xtok.errors import MapFileError, XtokError
from xtok.maps.events import EventMap
from xtok.maps.file import to_nemo, to_safetensors
from xtok.maps.packing import MAX_HEADER
from xtok.maps.projection_map import ProjectionMap
from xtok.maps.spellings import SpellingMap
from xtok.tokenizers.table import Decoded, TokenEntry, TokenType

TINY_FILE, TINY_PT = edited(), to_nemo(TINY)  # the first version without a digest of its tensors
START = 8 + int.from_bytes(TINY_FILE[:8], "little")
HEADER, CONTENT = json.loads(TINY_FILE[8:START]), TINY_FILE[START:]
FIELDS = json.loads(HEADER["__metadata__"]["xtok"])
OVERHEAD = 128 << 20
"""What reading may take beyond twice the file: Python objects of a header of up to 8 MiB."""


def with_header(header: object, content: bytes = CONTENT) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


def rezipped(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return a `.pt` with changed members."""
    return zipped({name: change(content) for name, content in members(data).items()})


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(contents: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return buffer.getvalue()


class Evil:
    def __reduce__(self) -> Any:
        return (os.system, ("touch evil",))


HALVES = {"indices": torch.zeros(2, 2, dtype=torch.int64), "likelihoods": torch.ones(2, 2)}
UNNAMED = pt_bytes({**FOREIGN, "model_A_id": "aXX"})
UNNAMED = rezipped(UNNAMED, lambda member: member.replace(b"aXX", b"\xed\xa0\x80"))
TWICE = b'"weights":{"dtype":"F32","shape":[7],"data_offsets":[0,28]},"weights":'
TWICE += b" " * (-len(TWICE[10:]) % 8)
DAMAGES: list[tuple[str, bytes]] = [
    ("weights is not a 1-D", edited({"weights": np.ones(7)})),
    ("student_ids is not a 1-D", edited({"student_ids": np.zeros((7, 1), np.int32)})),
    ("enable_scale_trick", edited({"scale_slot": None})),
    ("sum to 0.5, expected 1|not sorted", edited({"weights": np.full(7, 0.5, np.float32)})),
    ("the student's table of", edited({"student_token_types": np.ones(5, np.uint8)})),
    ("student_token_types is not", edited({"student_token_types": np.full(6, 9, np.uint8)})),
    ("teacher_token_offsets is", edited({"teacher_token_offsets": np.array([0, 2, 1, 2, 2])})),
    ("teacher's table_sha256", edited({"teacher_token_bytes": np.array([97, 99], np.uint8)})),
    ("a special token of the student", edited({"student_token_types": np.full(6, 3, np.uint8)})),
    ("the student's vocab_size -1", edited(student__vocab_size=-1)),
    ("the student's token id 9", edited(student__control_names={"9": "x"})),
    ("invalid literal", edited(student__roles={"bos": ["x"]})),
    ("NoneType", edited(student=None)),
    ("history is not valid", edited(history=[{"stage": 1, "options": {}}])),
    ("lacks 'stage'", edited(history=[{}])),
    ("more entries than top_k=2", edited(top_k=2)),
    ("top_k is not valid", edited(top_k=10**30)),
    ("surrogates not allowed", edited(student__model_id="\ud800")),
    ("the student's revision", edited(student__revision=3)),
    ("tokenizer_vocab_size", edited(student__tokenizer_vocab_size=1.5)),
    ("no Infinity", edited(teacher__preferred_ids=[float("inf")])),
    ("top_k is not valid", edited(top_k=1.5)),
    ("weights", with_header(TINY_FILE[8:START].replace(b'"weights":', TWICE))),
    *(
        (f"lacks '{name}'", write({other: HALVES[other]}))
        for name, other in permutations(HALVES)
        for write in (save, pt_bytes)
    ),
    ("objects that could run code", pt_bytes({**FOREIGN, "x": Evil()})),
    ("surrogates not allowed", UNNAMED),
]
"""Files of both formats, each with words of its error message."""
INVALID_PT: list[Any] = [
    "text",
    {},
    {"indices": torch.zeros(3)},
    {"indices": torch.zeros(3), "likelihoods": torch.zeros(3)},
    {**FOREIGN, "indices": FOREIGN["indices"].float()},
    {**FOREIGN, "likelihoods": torch.ones(5, 2)},
    {**FOREIGN, "likelihoods": -FOREIGN["likelihoods"]},
    {**FOREIGN, "likelihoods": FOREIGN["likelihoods"] * float("nan")},
    {(0, 1, 2): 3},
    {(0, 1): "x"},
    {(0, -1): 1},
    {(0, 2**31): 1},
    torch.zeros(3),
    {**FOREIGN, "xtok": {"tensors": {}, "metadata": "{}"}},
    {"indices": torch.tensor([[1, -7]]), "likelihoods": torch.tensor([[1.0, 0.0]])},
    {"indices": torch.tensor([[1, -1]]), "likelihoods": torch.tensor([[1.0, float("nan")]])},
]
DAMAGES += [("is not a valid map", pt_bytes(value)) for value in INVALID_PT]


@pytest.mark.parametrize(("message", "data"), DAMAGES)
def test_an_error_names_the_damaged_file_and_the_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, data: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    widths = {"student_vocab_size": 5, "teacher_vocab_size": 4} if data[:2] == b"PK" else {}
    with pytest.raises(MapFileError, match=message) as caught:
        load_bytes(data, tmp_path, **widths)
    assert str(tmp_path / "foreign.pt") in caught.value.message
    assert os.listdir(tmp_path) == ["foreign.pt"]  # the file's code was not executed


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("event 1 ", lambda t, f: t["student_event"].fill(0)),
        ("teacher_event", lambda t, f: t["teacher_event"].fill(-1)),
        ("does not have shape", lambda t, f: t.update(student_event=t["student_event"][1:])),
        (
            "student_link",
            lambda t, f: t.update(student_link=t["student_link"].astype(np.int64)),
        ),
        ("event of its link", lambda t, f: t["student_link"].fill(3)),
        ("student_link", lambda t, f: t["student_link"].fill(10**6)),
        ("it lacks 'teacher_link'", lambda t, f: t.update(teacher_link=None)),
        ("a side has no tokens", lambda t, f: t.update(student_event=np.zeros(0, np.int32))),
        ("rest event 1000000000", lambda t, f: f.update(rest=10**9)),
        ("rest is not valid", lambda t, f: f.update(rest="x")),
        ("is not a valid map", lambda t, f: f.update(history=[3])),
        ("format version is 9", lambda t, f: f.update(format_version=9)),
        ("the teacher's table_sha256", lambda t, f: f["teacher"].update(table_sha256="0")),
    ],
)
def test_a_damaged_event_map(tmp_path: Path, message: str, change: Change) -> None:
    path = tmp_path / "events.safetensors"
    data = changed_file(to_safetensors(xtok.events("bytes", "bytes")), change)
    for content, what in ((data, message), (data[:-100], "complete")):
        path.write_bytes(content)
        with pytest.raises(MapFileError, match=what):
            EventMap.load(path)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("student_counts", lambda t, f: t["student_counts"].fill(-1)),
        ("does not have shape", lambda t, f: t.update(student_counts=t["student_counts"][1:])),
        ("teacher_pieces has", lambda t, f: t.update(teacher_pieces=t["teacher_pieces"][1:])),
        ("student_pieces", lambda t, f: t["student_pieces"].fill(10**6)),
        ("student id 5 ", lambda t, f: t["student_pieces"].__setitem__(5, 6)),
        ("other bytes: 258", lambda t, f: t["student_pieces"].__setitem__(-1, 0)),
        ("other bytes: 258", lambda t, f: t["student_pieces"].__setitem__(-1, 256)),
        ("of int32", lambda t, f: t.update(student_counts=t["student_counts"].astype(np.int64))),
        ("it lacks 'teacher_pieces'", lambda t, f: t.update(teacher_pieces=None)),
    ],
)
def test_a_damaged_spelling_map(tmp_path: Path, message: str, change: Change) -> None:
    student = byte_ranks(tmp_path / "s.tiktoken", "ab", "abc", "cd")
    teacher = byte_ranks(tmp_path / "t.tiktoken", "ab")
    path = tmp_path / "m.safetensors"
    path.write_bytes(changed_file(to_safetensors(xtok.spellings(student, teacher)), change))
    with pytest.raises(MapFileError, match=message):
        SpellingMap.load(path)


@pytest.mark.parametrize("data", [TINY_FILE, TINY_PT])
def test_truncated_files_are_errors(tmp_path: Path, data: bytes) -> None:
    for length in [*range(0, len(data), 97), len(data) - 1]:
        with pytest.raises(MapFileError):
            load_bytes(data[:length], tmp_path)


def test_hint_to_normalize_is_given_only_for_changed_weights(tmp_path: Path) -> None:
    """The hint does not depend on the text of the message."""
    for other in ({"student__backend": ["> 0 sums to"]}, {"format_version": "sums to 2"}):
        with pytest.raises(MapFileError) as caught:
            load_bytes(edited(**other), tmp_path)
        assert caught.value.parameter == ""


def error_or_valid(data: bytes, folder: Path) -> None:
    with suppress(XtokError):
        projection = load_bytes(data, folder)
        projection.check()
        xtok.describe(projection, num_examples=2)


word = st.text(max_size=5)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | word,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(word, inner, max_size=3),
    max_leaves=5,
)
SLOW = HealthCheck.function_scoped_fixture, HealthCheck.too_slow
fuzz = settings(max_examples=150, suppress_health_check=SLOW)


@fuzz
@given(data=st.data())
def test_a_changed_header_is_an_error_or_a_valid_map(tmp_path: Path, data: st.DataObject) -> None:
    header = json.loads(json.dumps(HEADER))
    name = data.draw(st.sampled_from([n for n in HEADER if n != "__metadata__"]))
    number = st.integers(-10, 300) | st.sampled_from([2**31, 2**63, 2**64, -(2**63)])
    change = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "all", "gone"]))
    if change == "gone":
        del header[name]
    elif change == "all":
        header[name] = data.draw(anything)
    elif change == "dtype":
        header[name]["dtype"] = data.draw(st.sampled_from(["U8", "I64", "BF16", "F4", "", 7, []]))
    else:
        header[name][change] = data.draw(st.lists(number, max_size=3) | anything)
    error_or_valid(with_header(header), tmp_path)


@fuzz
@given(data=st.data())
def test_changed_metadata_are_an_error_or_a_valid_map(tmp_path: Path, data: st.DataObject) -> None:
    fields = json.loads(json.dumps(FIELDS))
    part = fields
    if data.draw(st.booleans()):
        part = fields[data.draw(st.sampled_from(["student", "teacher"]))]
    part[data.draw(st.sampled_from(sorted(part)))] = data.draw(anything)
    header = {**HEADER, "__metadata__": {"xtok": json.dumps(fields)}}
    error_or_valid(with_header(header), tmp_path)


@fuzz
@given(data=st.data())
def test_a_changed_pt_is_an_error_or_a_valid_map(tmp_path: Path, data: st.DataObject) -> None:
    """Damage one archive member together with its checksum, or any byte of the file."""
    with zipfile.ZipFile(io.BytesIO(TINY_PT)) as archive:
        members = {name: bytearray(archive.read(name)) for name in archive.namelist()}
    whole = bytearray(TINY_PT)
    target = data.draw(st.sampled_from([whole, *filter(None, members.values())]))
    for _ in range(data.draw(st.integers(1, 3))):
        target[data.draw(st.integers(0, len(target) - 1))] = data.draw(st.integers(0, 255))
    if target is not whole:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        whole[:] = file.getvalue()
    error_or_valid(bytes(whole), tmp_path)


@settings(fuzz, max_examples=60)
@given(data=st.data())
def test_a_pt_of_other_things_is_an_error_or_a_valid_map(
    tmp_path: Path, data: st.DataObject
) -> None:
    shape = st.lists(st.integers(0, 5), max_size=3)
    dtypes = [torch.int64, torch.float32, torch.bool, torch.bfloat16, torch.complex64]
    tensor = st.builds(lambda s, d: torch.ones(s).to(d), shape, st.sampled_from(dtypes))
    value = tensor | anything
    keys = ["indices", "likelihoods", "enable_scale_trick", "xtok", "student_model_id"]
    loaded = data.draw(value | st.dictionaries(st.sampled_from(keys), value))
    error_or_valid(pt_bytes(loaded), tmp_path)


def hostile() -> Iterator[tuple[str, bytes]]:
    """Return safetensors files that declare far more memory than their size, or that recurse."""
    shape = {**HEADER["weights"], "shape": [2**40]}
    yield "a shape of 2^40", with_header({**HEADER, "weights": shape})
    offsets = {**shape, "data_offsets": [0, 2**42]}
    yield "offsets of 2^42", with_header({**HEADER, "weights": offsets})
    yield "a header of 2^60 bytes", (2**60).to_bytes(8, "little") + CONTENT
    for what, element in (("lists", b"[],"), ("strings", b'"ab",')):
        many = b'{"a":[' + element * ((MAX_HEADER - 100) // len(element)) + b"0]}"
        yield what, with_header(many, b"")
    names = b",".join(b'"%x":[]' % i for i in range(1 << 18))
    yield "names", with_header(b"{" + names + b"}", b"")
    yield "a deep header", with_header(b"[" * 500_000, b"")
    yield "deep metadata", with_header({**HEADER, "__metadata__": {"xtok": "[" * 500_000}})
    yield "a wide vocabulary", edited(student__vocab_size=2**24)
    yield "a wider one", edited(teacher__vocab_size=2**60)
    yield "a name twice", with_header(b'{"a":0,"a":0}', b"")
    same = {**HEADER, "teacher_ids": HEADER["student_ids"]}
    yield "two tensors in one place", with_header(same)


@pytest.mark.parametrize(("what", "data"), [pytest.param(*h, id=h[0]) for h in hostile()])
def test_a_hostile_file_needs_little_memory(tmp_path: Path, what: str, data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(XtokError):
            load_bytes(data, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 2 * len(data) + OVERHEAD, what


def large_map() -> ProjectionMap:
    """A map of 100,000 rows with 16 entries each."""
    rows, top_k = 100_000, 16
    entries = [TokenEntry(i, TokenType.NORMAL, b"%x" % i) for i in range(rows)]
    table = Decoded(entries).table(rows)
    side = replace(TINY.student, vocab_size=rows, table=table)
    return replace(
        TINY,
        student=side,
        teacher=side,
        student_ids=np.repeat(np.arange(rows, dtype=np.int32), top_k),
        teacher_ids=np.tile(np.arange(top_k, dtype=np.int32), rows),
        weights=np.full(rows * top_k, 1 / top_k, np.float32),
        row_kind=np.full(rows, 2, np.uint8),
        scale_slot=None,
        top_k=top_k,
    )


def test_reading_and_writing_need_less_than_twice_the_file(tmp_path: Path) -> None:
    path = tmp_path / "map.safetensors"
    projection = large_map()
    tracemalloc.start()
    try:
        projection.save(path)
        writing = tracemalloc.get_traced_memory()[1]
        del projection
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        ProjectionMap.load(path)
        reading = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    size = path.stat().st_size
    assert size > 20e6
    assert writing < 1.01 * size
    assert reading < 2 * size


def hostile_pt() -> Iterator[tuple[str, Callable[[], bytes]]]:
    def shared() -> bytes:
        """Return nested dicts with 2^60 paths: each dict contains the next dict twice."""
        a, b = b"X\x01\x00\x00\x00a", b"X\x01\x00\x00\x00b"
        inner = (b"}q%c(%sh%c%sh%cu" % (i, a, i - 1, b, i - 1) for i in range(1, 61))
        pickle = b"\x80\x02}q\x00" + b"".join(inner) + b"."
        return zipped({"archive/data.pkl": pickle, "archive/version": b"3\n"})

    def bomb() -> bytes:
        """A member of 200 MB of zeros, compressed to 200 kB."""
        huge = {"archive/data/99": bytes(200_000_000)}
        return zipped({**members(TINY_PT), **huge}, zipfile.ZIP_DEFLATED)

    def expanded() -> bytes:
        id_zero, weight = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
        shape = (1_000_000, 1000)
        return pt_bytes({"indices": id_zero.expand(shape), "likelihoods": weight.expand(shape)})

    def outside() -> bytes:
        """Return a compressed sparse matrix with row offsets far outside its values."""
        rows, columns = torch.tensor([0, 10**9, 10**10, 3]), torch.tensor([1, -5, 10**9])
        matrix = torch.sparse_csr_tensor(
            rows, columns, torch.ones(3), (3, 9), check_invariants=False
        )
        return pt_bytes(matrix)

    def grown() -> bytes:
        """Return a tensor of a few bytes that declares 2^28 rows in its pickle."""
        data = pt_bytes({"indices": torch.ones(1, 1), "likelihoods": torch.ones(1, 1)})
        rows = b"K\x01K\x01\x86", b"J\0\0\0\x10K\x01\x86"
        return rezipped(data, lambda member: member.replace(*rows))

    def sorted_indices() -> bytes:
        """Return indices with strides of 0, in which PyTorch compares neighbours."""
        ids = torch.zeros(2, 1, dtype=torch.int64).expand(2, 50_000_000)
        values = torch.ones(1).expand(50_000_000)
        options: Any = {"check_invariants": False, "is_coalesced": True}
        return pt_bytes(torch.sparse_coo_tensor(ids, values, (9, 9), **options))

    def blocks() -> bytes:
        """Return a block with strides of 0."""
        block, id_zero = (
            torch.ones(1, 1, 1).expand(1, 7000, 7000),
            torch.zeros(1, dtype=torch.int64),
        )
        parts = torch.tensor([0, 1]), id_zero, block
        return pt_bytes(torch.sparse_bsr_tensor(*parts, (7000, 7000), check_invariants=False))

    yield "dicts without end", shared
    yield "sparse, sorted indices", sorted_indices
    yield "sparse, blocks", blocks
    yield "a tensor beyond its storage", grown
    yield "a matrix that points outside", outside
    yield "a compressed archive", bomb
    yield "tensors without strides", expanded
    yield "a dense matrix without strides", lambda: pt_bytes(torch.ones(1).expand(100_000, 10_000))
    yield "no zip archive", lambda: b"\x80\x02" + TINY_PT


# Peak memory of the process in kilobytes; resource.getrusage would include the parent's peak.
PEAK = r"""
import re, sys
from pathlib import Path
import torch
def peak():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
"""


def valid_pt() -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Write large files of every layout, up to 20 MB."""
    rows, top_k = 40_000, 40
    ids = torch.arange(top_k).repeat(rows, 1)
    weights = torch.arange(top_k, 0, -1).repeat(rows, 1) / (top_k * (top_k + 1) / 2)
    back = {"indices": ids.flip(1), "likelihoods": weights.flip(1).bfloat16()}

    yield "padded", lambda: pt_bytes({"indices": ids, "likelihoods": weights})
    yield "reversed", lambda: pt_bytes(back)
    yield "sparse", lambda: pt_bytes(torch.ones(rows, 25).to_sparse())
    counts = {(i % rows, i // rows): float(i) for i in range(1, 400_000)}
    yield "counts", lambda: pt_bytes(counts)


_VALIDATE = torch._utils._validate_loaded_sparse_tensors
CHECKS_ITSELF = bool(signature(_VALIDATE).parameters) or "is_enabled" not in getsource(_VALIDATE)
"""Versions of PyTorch, 2.6 and 2.15 among them, that check sparse matrices while they load."""

READ_ALL = f"""{PEAK}
from xtok.errors import XtokError
from xtok.maps.projection_map import ProjectionMap
for path in sys.argv[1:]:
    before = peak()
    widths = dict() if "sparse" in path else dict(student_vocab_size=40_000, teacher_vocab_size=40)
    try:
        ProjectionMap.load(path, **widths)
        was_read = 1
    except XtokError:
        was_read = 0
    print(was_read, peak() - before)
"""


@pytest.mark.filterwarnings("ignore:Sparse")
def test_memory_for_a_pt_is_limited_by_the_size_of_the_file(
    tmp_path: Path,
) -> None:
    expected: list[int] = []
    paths: list[Path] = []
    for is_valid, files in enumerate((hostile_pt(), valid_pt())):
        for what, make in files:
            expected.append(is_valid)
            paths.append(tmp_path / f"{what}.pt")
            paths[-1].write_bytes(make())
    result = run_python(READ_ALL, *paths)
    assert result.returncode == 0, result.stderr
    lines = [[*map(int, line.split())] for line in result.stdout.splitlines()]
    assert [was_read for was_read, _ in lines] == expected
    for path, (was_read, peak) in zip(paths, lines, strict=True):
        size = path.stat().st_size
        most = 2 * size + OVERHEAD
        if was_read:
            assert size > 6e6
            # PyTorch creates a dict of counts with tuples, which takes twenty times the file size.
            most = (20 if path.stem == "counts" else 6) * size + OVERHEAD // 2
        if CHECKS_ITSELF and path.stem.startswith("sparse, "):
            continue
        assert peak << 10 <= most, path.name
