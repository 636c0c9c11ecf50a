"""Several processes that serve as one: the supervisor, its workers, and the memory they share."""
