"""A teacher's predictions in the tokens of a student: from files, or from a server."""
