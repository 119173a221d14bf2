"""Dataclasses as tables, lines and JSON."""
