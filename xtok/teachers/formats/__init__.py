"""Formats of top-k predictions in files and responses, independent of the student."""
