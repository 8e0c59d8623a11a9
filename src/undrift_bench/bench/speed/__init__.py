"""The `speed` benchmark."""
