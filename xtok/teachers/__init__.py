"""Projection of a teacher's predictions to the tokens of a student.

Predictions are a `TopK`: arrays of many documents. A cache yields `Documents`, a `TopK` with the
other columns of its rows. A server yields a `RankedTopK`, one sequence with ranks of its tokens.
A `SharedText` is a text in the tokens of both sides, without predictions.
"""
