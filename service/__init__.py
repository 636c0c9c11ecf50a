"""The online plane: answers queries over HTTP from one published index version."""
