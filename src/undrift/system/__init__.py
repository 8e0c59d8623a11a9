"""Files, locks, signals, progress bars and random state: what the library asks of the machine it runs on."""
