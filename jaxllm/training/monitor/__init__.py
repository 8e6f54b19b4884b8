"""Monitoring of a run: metrics log, progress, charts, report and run card."""
