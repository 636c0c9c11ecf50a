"""Vectors in a Milvus collection for each version; the head names the active one."""
