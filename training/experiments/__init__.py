"""Experiments: ablations and baselines of CARE, and synthetic texts for alignment."""
