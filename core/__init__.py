"""Shared code of indexer and service: data types, file formats, text and vector rules, errors."""
