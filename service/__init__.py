"""The online plane: searches one published index version over HTTP."""
