"""Vectors in one memory-mapped FAISS file beside the documents of a version."""
