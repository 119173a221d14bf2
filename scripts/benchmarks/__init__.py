"""The cases of benchmark.py, a module for each area."""
