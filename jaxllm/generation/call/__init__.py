"""Preparation of a `generate()` call on the host, and its output."""
