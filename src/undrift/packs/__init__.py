"""What is kept of an adaptation: domain files, fingerprints, exported networks."""
