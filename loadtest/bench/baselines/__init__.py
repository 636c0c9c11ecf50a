"""Other systems that `make bench` measures, each in a separate environment."""
