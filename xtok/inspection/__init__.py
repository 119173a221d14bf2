"""Describe, check and measure maps and tokenizers."""
