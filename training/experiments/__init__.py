"""Experiments around the trainer: ablations and baselines of CARE, and texts made for alignment."""
