"""Offline indexing: encodes a corpus and publishes immutable index versions."""
