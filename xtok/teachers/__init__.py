"""A teacher's predictions in a student's tokens.

Predictions are a `TopK`: arrays of many documents. What is stored is `Documents`, a `TopK` with the
rows' other columns; what a server answers is a `RankedTopK`, that of one sequence with the ranks of
its tokens. A `SharedText` is a text in both sides' tokens, without predictions.
"""
