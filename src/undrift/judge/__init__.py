"""How well it went: metrics, reports, plots, and verdicts without labels."""
