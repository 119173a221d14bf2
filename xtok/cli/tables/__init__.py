"""Print results as tables and lines on a terminal."""
