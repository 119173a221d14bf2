"""A kernel of `test_kernels.py` that Numba compiles in a few hundredths of a second."""

from __future__ import annotations

from xtok._lib.kernels import kernel


@kernel
def twice(number: int) -> int:
    return number + number
