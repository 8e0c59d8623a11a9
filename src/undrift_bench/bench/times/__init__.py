"""Measure the time per batch of finished cells."""
