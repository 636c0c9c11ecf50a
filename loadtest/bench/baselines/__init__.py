"""Other systems that `make bench` measures, each in an environment of its own."""
