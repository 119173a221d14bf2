"""The HTML page about maps."""
