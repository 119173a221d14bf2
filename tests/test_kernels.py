"""Where compiled kernels are kept, and that each is compiled once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xtok.alignment import kernels
from xtok.alignment.aligner import TokenAligner
from xtok.counting import kernels as counting_kernels
from xtok.counting.encode import TextEncoder
from xtok.tokenizers import Tokenizer

PROGRAM = """
import sys
from numba.core import caching
if "read-only" in sys.argv:
    cache = getattr(caching, "CacheImpl", None) or caching._CacheImpl
    cache._locator_classes = cache._locator_classes[:1]  # the folder that $NUMBA_CACHE_DIR names
from xtok.embeddings import kernels
import numpy as np
values, ids = np.zeros((1, 2), np.float32), np.zeros((1, 2), np.int32)
kernels.keep_largest(np.ones((1, 3), np.float32), 3, 0, False, values, ids)
assert ids.tolist() == [[0, 1]]
print(len(kernels.keep_largest.signatures), sum(kernels.keep_largest.stats.cache_hits.values()))
"""


def run(*args: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *args],
        env={**os.environ, **env}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.parametrize("mode", [None, 0o700, 0o777])
def test_kernels_are_kept_where_nothing_else_is_writable(tmp_path: Path, mode: int | None) -> None:
    """In a folder of this user alone: what is in it is run."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = tmp_path / f"xtok-kernels-{user}"
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    assert run("read-only", TMPDIR=str(tmp_path)) == "1 0"
    hits = int(mode != 0o777)
    assert run("read-only", TMPDIR=str(tmp_path)) == f"1 {hits}"
    assert any(folder.rglob("*.nbi")) == bool(hits)


def test_every_kernel_has_one_signature(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    """Another type of number, or a literal, compiles a kernel and all that it calls again."""
    aligner = TokenAligner(byte_level, sentencepiece)
    ids, other = byte_level.segment(b"the light of 12"), sentencepiece.segment(b"the night of 12 x")
    aligner.align_document(ids, other)
    for dtype in (np.int32, np.int64, np.uint16):
        aligner.align(np.array([ids], dtype), np.array([other], dtype))
    with TextEncoder(byte_level, sentencepiece) as encoder:
        for texts in (["one 12", ""], []):
            student, teacher = encoder.encode(texts)
            encoder.align(student, teacher)
    compiled = {
        f"{module.__name__}.{name}": len(function.signatures)
        for module in (kernels, counting_kernels)
        for name, function in vars(module).items()
        if hasattr(function, "signatures")
    }
    assert max(compiled.values()) == 1, compiled
