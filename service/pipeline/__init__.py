"""The way of a query through caches, batches, threads and the served index."""
