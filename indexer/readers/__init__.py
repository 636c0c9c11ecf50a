"""Readers of ordinary files: tables, documents with headings or pages, and archives of them.

A reader turns a file into records with the fields of a JSONL corpus. Readers run in a child process
with limits (`process`, `child`): files may come from strangers.
"""
