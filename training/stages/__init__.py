"""The kinds of stages: each class is a kind's keys in a recipe, its inputs, its key and its run."""
