"""The CMedTEB benchmark (arXiv 2604.10937): tasks, systems, scores, table, report."""
