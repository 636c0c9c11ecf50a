"""Training of pairs by recipes: initial checkpoints, stages, losses and results."""
