"""Build maps from the similarity of tokens."""
