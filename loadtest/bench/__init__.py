"""Benchmarks: the service over HTTP, the service beside other systems, and encoders."""
