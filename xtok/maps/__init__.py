"""Projection maps: arrays, invariants, files."""
