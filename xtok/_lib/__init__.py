"""What is not about tokens: files read and written, arrays, threads, Numba, progress."""
