"""Measurements beside peers; each program runs by itself: `python -m benchmarks.rpc`."""
