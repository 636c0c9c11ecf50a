"""Stores for the vectors of index versions: FAISS files and Milvus collections."""
