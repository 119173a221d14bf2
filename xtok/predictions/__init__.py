"""A teacher's predictions as arrays, and their validation."""
