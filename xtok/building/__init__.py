"""The stages that make and refine a map; each takes values and returns a value."""
