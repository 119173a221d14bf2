"""Training with a map: module, losses, collator."""
