"""The two sides of a pair: their names, and how wide either may be."""

SIDES = "student", "teacher"
"""The rows of a map, and its columns."""

MAX_WIDTH = 2**24
"""The widest vocabulary accepted: 64 times the largest in use; ids stay int32."""
