"""The `analysis` benchmark."""
