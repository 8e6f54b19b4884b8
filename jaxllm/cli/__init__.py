"""Command-line interface.

Internal: the commands are the interface (docs/cli.md).
"""
