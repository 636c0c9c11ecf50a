"""Load generators for a running service; `bench` holds benchmarks and comparisons."""
