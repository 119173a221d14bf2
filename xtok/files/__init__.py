"""Input files: what is found, cut into shards, decompressed, and read line by line."""
