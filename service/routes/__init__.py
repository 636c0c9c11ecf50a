"""The routes of the API, and how their answers are made."""
