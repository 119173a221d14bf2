"""Align two tokenizations of the same text, chunk by chunk."""
