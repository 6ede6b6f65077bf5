"""Benchmarks, each a ratio to a named peer in one run: `python -m benchmarks` lists them."""
