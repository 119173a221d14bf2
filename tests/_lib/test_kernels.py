"""Where compiled kernels are stored, and that each kernel is compiled once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from checks import works
from command_lines import run_python
from make_tokenizers import byte_ranks

import xtok
from xtok._lib.compiling import KernelFiles
from xtok._lib.io import write_sealed
from xtok.alignment import kernels
from xtok.alignment.aligner import TokenAligner
from xtok.building.counting import kernels as counting_kernels
from xtok.building.counting.aligned import align_texts
from xtok.building.counting.encode import TextEncoder
from xtok.tokenizers import Tokenizer

PROGRAM = f"""
import resource
import sys
import numba
from numba.core import caching
if "other version" in sys.argv:
    numba.__version__ = "0.0"
if "no room" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
if "read-only" in sys.argv:
    cache = getattr(caching, "CacheImpl", None) or caching._CacheImpl
    cache._locator_classes = cache._locator_classes[:1]  # the folder that $NUMBA_CACHE_DIR names
sys.path.insert(0, {str(Path(__file__).parent)!r})
from small_kernel import twice
assert twice(2) == 4
print(len(twice.signatures), sum(twice.stats.cache_hits.values()))
"""


EVERY_KERNEL = """
import sys
import numpy as np
import xtok
from xtok.alignment import kernels as of_alignment
from xtok.building.counting import kernels as of_counting
from xtok.building.embeddings import kernels as of_embeddings
from xtok.teachers import credit_kernels as of_credit
student, teacher = map(xtok.load_tokenizer, sys.argv[1:3])
aligner = xtok.TokenAligner(xtok.load_pair(student, teacher))
aligner.python_tokens_left = 0
aligner.align_document(student.segment(b"a is b"), teacher.segment(b"a in b"))
given = aligner, [*b"bc"], [256], [-1.0]
xtok.project_logprobs(*given, credit=xtok.PrefixCredit([[256]], [[-1.0]]))
projection = xtok.build(student, teacher, texts=sys.argv[3])
xtok.evaluate(xtok.load_pair(student, teacher), projection, sys.argv[3])
xtok.generate(xtok.load_pair(student, teacher), "spelling")
values, ids = np.zeros((1, 2), np.float32), np.zeros((1, 2), np.int32)
of_embeddings.keep_largest(np.ones((1, 3), np.float32), 3, 0, False, values, ids)
for module in (of_alignment, of_counting, of_embeddings, of_credit):
    for name, function in vars(module).items():
        if hasattr(getattr(function, "_cache", None), "_cache_file"):
            print(name, sum(function.stats.cache_hits.values()))
"""


def run(*args: str | Path, program: str = PROGRAM, **env: str) -> str:
    return works(run_python(program, *args, env={**os.environ, **env})).stdout.strip()


@pytest.mark.parametrize("mode", [None, 0o777])
def test_kernels_are_cached_in_a_temporary_folder_if_necessary(
    tmp_path: Path, mode: int | None
) -> None:
    """Python executes the files in this folder, so only its user may write there."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = tmp_path / f"xtok-kernels-{user}"
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    assert run("read-only", TMPDIR=str(tmp_path)) == "1 0"
    hits = int(mode is None)
    assert run("read-only", TMPDIR=str(tmp_path)) == f"1 {hits}"
    assert any(folder.rglob("*.nbc")) == bool(hits)


def test_every_kernel_is_cached(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc " * 9)
    models = [tmp_path / "student.tiktoken", tmp_path / "teacher.tiktoken"]
    byte_ranks(models[0], "ab", "c ")
    byte_ranks(models[1], "bc", " a")
    arguments = [f"{model}@.+" for model in models]
    for _ in range(2):  # the first run compiles the kernels that no test has called yet
        words = run(*arguments, text, program=EVERY_KERNEL).split()
        if words[1::2] == ["1"] * 9:
            break
    assert words[1::2] == ["1"] * 9


def test_a_damaged_kernel_is_compiled_again(tmp_path: Path) -> None:
    assert run(NUMBA_CACHE_DIR=str(tmp_path)) == "1 0"
    [file] = tmp_path.rglob("*.nb?")
    file.write_bytes(file.read_bytes()[:-1])
    for expected in ("1 0", "1 1"):
        assert run(NUMBA_CACHE_DIR=str(tmp_path)) == expected
    assert [*tmp_path.rglob("*.nb?")] == [file]


def test_damaged_kernel_files_are_not_loaded(tmp_path: Path) -> None:
    files = KernelFiles(tmp_path / "kernel", "a version")
    for key in ("key", "another"):
        files.save(key, [key] * 100)
    path = files.path("key")
    content, half = path.read_bytes(), path.stat().st_size // 2
    damages = [
        b"",
        content[:half],
        content[:half] + bytes(len(content) - half),
        content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :],
        files.path("another").read_bytes(),
    ]
    for damaged in damages:
        path.write_bytes(damaged)
        assert files.load("key") is None
    path.write_bytes(content)
    assert files.load("key") == ["key"] * 100


def test_kernel_file_that_names_missing_classes_is_not_loaded(tmp_path: Path) -> None:
    """An update of a library can remove a class and leave the kernel unchanged."""
    files = KernelFiles(tmp_path / "kernel", "a version")
    for name in (b"no_such_module", b"pathlib"):
        path = files.path("key")
        write_sealed(path, [b"c" + name + b"\nNoSuchClass\n."], path.name)
        assert files.load("key") is None


def test_processes_that_compile_a_kernel_at_once(tmp_path: Path) -> None:
    """Both processes start with an empty cache, and both write the kernel."""
    with ThreadPoolExecutor() as pool:
        [*pool.map(lambda _: run(NUMBA_CACHE_DIR=str(tmp_path)), range(2))]
    assert run(NUMBA_CACHE_DIR=str(tmp_path)) == "1 1"


def test_versions_of_numba_do_not_replace_each_others_kernels(tmp_path: Path) -> None:
    for expected in ("1 0", "1 1"):
        for version in ("this version", "other version"):
            assert run(version, NUMBA_CACHE_DIR=str(tmp_path)) == expected


def test_kernels_run_if_the_disk_is_full(tmp_path: Path) -> None:
    for _ in range(2):
        assert run("no room", NUMBA_CACHE_DIR=str(tmp_path)) == "1 0"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_kernels_run_without_numbas_compiler() -> None:
    """`scripts/coverage.sh` disables the compiler to see which lines of kernels run."""
    program = PROGRAM.replace("print(", "assert not hasattr(twice, 'signatures') # ")
    assert run(program=program, NUMBA_DISABLE_JIT="1") == ""


def test_every_kernel_has_one_signature(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    """For another number type, or a literal, Numba would compile a kernel again."""
    functions = {
        f"{module.__name__}.{name}": function
        for module in (kernels, counting_kernels)
        for name, function in vars(module).items()
        if hasattr(function, "signatures")
    }
    before = {name: set(function.signatures) for name, function in functions.items()}
    aligner = TokenAligner(xtok.load_pair(byte_level, sentencepiece))
    aligner.python_tokens_left = 0
    ids, other = byte_level.segment(b"the light of 12"), sentencepiece.segment(b"the night of 12 x")
    aligner.align_document(ids, other)
    for dtype in (np.int32, np.int64, np.uint16):
        aligner.align(np.array([ids], dtype), np.array([other], dtype))
    with TextEncoder(byte_level, sentencepiece) as encoder:
        for texts in (["one 12", ""], []):
            align_texts(aligner, *encoder.start_encoding(texts)())
    compiled = {n: len(set(f.signatures) - before[n]) for n, f in functions.items()}
    assert max(compiled.values()) <= 1, compiled
    assert functions["xtok.alignment.kernels.align_documents"].signatures
