"""Text in, counts of token pairs out."""
