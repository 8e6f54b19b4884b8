"""Monitoring of a run: metrics log, progress, charts, report and run card.

Internal: runs of `jaxllm.training.run` write and show them.
"""
