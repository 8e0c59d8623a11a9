"""The `online` benchmark."""
