"""Changes of an index by segments: what they write, commits of live writes, and merges."""
