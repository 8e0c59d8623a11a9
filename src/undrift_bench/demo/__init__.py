"""`make demo`: two kinds of handwritten digits, six ways to adapt from one to the other, and what each is worth.

`python -m undrift_bench.demo --out out/demo` prints the tables, says whether VMP gained over its controls, and leaves
demo.json, demo.png and a domain file. docs/demo.md shows a run.

Read `rows.py` (what is compared) first, then `finding.py` (what may be said about it).
"""
