"""Kinds of stages: each class defines a kind's keys in a recipe, its inputs, and how it runs."""
