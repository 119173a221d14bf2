"""Count token pairs on text."""
