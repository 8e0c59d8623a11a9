"""`make demo`: a digit network meets digits of another kind, with the default recipe and its rivals.

`python -m undrift_bench.demo --out out/demo` prints one table and one sentence, and leaves demo.json, demo.png and a
pack. docs/tutorial/demo.md shows a run.

Read `rows.py` (what is compared) first, then `finding.py` (what may be said about it).
"""
