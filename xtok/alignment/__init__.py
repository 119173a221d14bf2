"""Alignment of two tokenizations of one text in chunks."""
