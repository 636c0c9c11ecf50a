"""Encoders, pairs of encoders and their registry, and the weights of the embedded pair."""
