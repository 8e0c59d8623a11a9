"""Metrics, reports, plots, and verdicts without labels."""
