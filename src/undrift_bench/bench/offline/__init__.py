"""The `offline` benchmark."""
