"""Read and write formats of top-k predictions in files and responses."""
