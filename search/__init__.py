"""A query over one snapshot of an index: channels, fusion, limits, rerank, evidence, hits."""
