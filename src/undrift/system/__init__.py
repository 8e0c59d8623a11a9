"""Files, locks, signals, progress bars, random state: services of the machine."""
