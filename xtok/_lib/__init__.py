"""Infrastructure that is independent of tokens: files, arrays, threads, Numba and progress."""
