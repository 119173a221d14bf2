"""The HTML report page about maps."""
