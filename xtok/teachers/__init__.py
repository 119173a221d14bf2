"""Project a teacher's predictions onto the tokens of a student.

A `TopK` contains the predictions for many documents. A `Documents` object contains a `TopK` and the
other columns of the same documents. A `RankedTopK` contains a server's predictions for one
sequence, and the rank of each token of the sequence. A `SharedText` contains one text in the
student's tokens and in the teacher's tokens, without predictions.
"""
