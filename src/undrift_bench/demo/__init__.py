"""`make demo`: adapt from one kind of handwritten digits to another in six ways, and compare.

`python -m undrift_bench.demo --out out/demo` prints the tables, says whether VMP gained over its controls, and leaves
demo.json, demo.png and a domain file. docs/tutorial/demo.md shows a run.

Read `rows.py` (what is compared) first, then `finding.py` (what may be said about it).
"""
