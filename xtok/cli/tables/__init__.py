"""Results as tables and lines on a terminal."""
