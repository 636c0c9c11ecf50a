"""The `care` command: one module for each group of subcommands."""

import os
import sys

if os.name != "posix":  # before modules are imported that Windows does not have
    wanted = "on Windows use WSL 2 or the container image"
    sys.exit(f"error: care needs Linux or macOS: {wanted} [needs_linux]")
