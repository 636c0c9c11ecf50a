"""Scoring of systems: metrics, runs and qrels, statistics, BM25, plots, CMedTEB."""
