"""A teacher's predictions as arrays, and the rules that they must obey."""
