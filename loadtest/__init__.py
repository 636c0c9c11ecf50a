"""Load generators for a running service, and in `bench` its benchmarks beside other systems."""
