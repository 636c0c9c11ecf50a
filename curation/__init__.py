"""Construction of benchmarks and training data with language models as judges."""
