"""Vectors in a Milvus collection for each version; an alias points to the active one's."""
