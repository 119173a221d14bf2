"""What there is to know of maps and tokenizers; returns dataclasses, prints nothing."""
