"""Store of vectors in a memory-mapped FAISS file in the folder of a version."""
