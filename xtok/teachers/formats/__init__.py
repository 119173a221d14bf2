"""Read and write top-k predictions in the formats of files and of servers' responses."""
