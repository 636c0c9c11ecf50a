"""Where the vectors of index versions are kept and searched: FAISS files, or Milvus."""
