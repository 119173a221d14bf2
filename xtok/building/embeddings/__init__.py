"""Maps from token embeddings."""
