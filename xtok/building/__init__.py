"""What makes maps of every kind, in stages; each takes values and returns a value."""
