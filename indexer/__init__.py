"""The offline plane: a corpus to vectors to a published, immutable index version."""
