"""Maps of a pair: projection maps, event maps and spelling maps."""
