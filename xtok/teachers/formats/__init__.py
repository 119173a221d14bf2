"""A teacher's top-k at rest or on the wire, whoever wrote it; no second tokenizer is known here."""
