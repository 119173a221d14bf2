"""Project a teacher's predictions onto the tokens of a student.

Predictions are a `TopK`, which contains arrays for many documents. A file is read as `Documents`: a
`TopK` and the other columns of the file. A server's response is read as a `RankedTopK`: a `TopK`
for one sequence, with the ranks of the tokens. A `SharedText` is a text in the student's tokens and
in the teacher's tokens, without predictions.
"""
