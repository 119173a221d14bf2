"""The two sides of a pair, and the maximum width of a vocabulary."""

SIDES = "student", "teacher"
"""Rows and columns of a map."""

MAX_WIDTH = 2**24
"""Maximum width of a vocabulary: 64 times the largest published one; ids fit int32."""
