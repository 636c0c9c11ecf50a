"""Benchmarks: the service beside other systems, index types by speed and recall, starts, builds."""
