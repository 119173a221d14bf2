"""A teacher's stored predictions, in the tokens of a student."""
