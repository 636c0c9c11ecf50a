"""Benchmarks: the service and other systems, index types, service start, and index builds."""
