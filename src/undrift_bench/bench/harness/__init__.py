"""What all benchmarks share: cells, records, tables, figures, timing."""
