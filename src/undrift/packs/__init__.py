"""Domain files, fingerprints, and export of the adapted network."""
