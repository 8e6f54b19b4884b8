"""Checked arguments and padded batches of a call."""
