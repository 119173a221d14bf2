"""Project a teacher's predictions onto the tokens of a student.

A `TopK` contains the predictions for many documents. `Documents` contains a `TopK` and the other
columns of a file. A `RankedTopK` contains a server's predictions for one sequence, and the rank of
each token. A `SharedText` contains one text in the tokens of both sides, without predictions.
"""
