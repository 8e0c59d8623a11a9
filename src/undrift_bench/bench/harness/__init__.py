"""Shared by all benchmarks: cells, records, tables, figures."""
