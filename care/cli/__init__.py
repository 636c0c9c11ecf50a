"""The `care` command: one module for each group of subcommands."""
