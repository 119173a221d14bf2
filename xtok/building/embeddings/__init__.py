"""Maps from token similarity."""
