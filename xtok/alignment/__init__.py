"""Two tokenizations of one text, in chunks that they share."""
