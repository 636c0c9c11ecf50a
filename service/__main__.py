"""`python -m service`: the search service, configured by `CARE_*` variables.

`python -m service key --name app --role search` makes a key for `CARE_API_KEYS`.
"""

import argparse
import os
import sys
from collections.abc import Sequence

# Before faiss is imported: threads of OpenMP that wait must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Likewise the tokenizer's own threads: requests are the parallelism.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from core.cli import run
from service.api_keys import Role, new_key
from service.server import serve
from service.settings import read_settings


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m service", description="Serve an index, as the CARE_* variables say."
    )
    commands = parser.add_subparsers(dest="command")
    key = commands.add_parser("key", help="make a key for CARE_API_KEYS")
    key.add_argument("--name", required=True, help="who will use it")
    key.add_argument("--role", choices=("search", "admin"), default="search")
    chosen = parser.parse_args(arguments)
    if chosen.command == "key":
        return run(lambda: _print_key(chosen.name, chosen.role))
    return run(lambda: serve(read_settings()))


def _print_key(name: str, role: Role) -> None:
    secret, entry = new_key(name, role)
    print(f"{secret}\n{entry}")
    print("The first line is for the client, the second for CARE_API_KEYS.", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
