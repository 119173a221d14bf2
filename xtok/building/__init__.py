"""Build projection maps, event maps and spelling maps from two tokenizers."""
