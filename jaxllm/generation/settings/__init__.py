"""Generation settings: fields, value checks, lengths and special tokens."""
