"""Batch jobs over files: journal, report, and several processes."""
