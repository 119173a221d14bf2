"""Descriptions, checks and measures of maps and tokenizers."""
