"""How fast each op is, beside its physical limit and its peers, and how much memory it takes.

`pytest benchmarks/bench_segment_gae.py` times one op with pytest-benchmark. `python -m benchmarks.report [--quick]`
runs everything and writes `benchmarks/results/`. Both run the cases that the `bench_<op>.py` files define.
"""
