"""One self-contained HTML page about a run: no network, no script, readable on paper and on a phone."""
