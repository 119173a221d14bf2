"""Project a teacher's predictions onto the tokens of a student.

Predictions are a `TopK`, which contains arrays for many documents. A cache yields `Documents`: a
`TopK` with the other columns of its rows. A server yields a `RankedTopK`: one sequence with the
ranks of its tokens. A `SharedText` is a text in the tokens of both sides, without predictions.
"""
