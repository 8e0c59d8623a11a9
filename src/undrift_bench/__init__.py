"""Benchmarks, zoo, source training, published data sets and the demo; beside the library, not in its wheel."""
