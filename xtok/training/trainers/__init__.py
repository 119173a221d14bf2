"""Trainers of other libraries with xtok: one module per library."""
