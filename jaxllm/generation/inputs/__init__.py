"""Checked arguments and padded batches of a call.

Internal: the checks that settings, processors, strategies and scoring share.
"""
