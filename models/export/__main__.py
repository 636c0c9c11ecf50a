"""Exports a pair's query side for the service: `python -m models.export --help`."""

import argparse
import sys
from pathlib import Path

from core.errors import CareError
from models.export.query_side import export_query_side
from models.pairs import load_pair


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m models.export",
        description="Exports the query side of a pair, a checkpoint, to ONNX in float32.",
    )
    parser.add_argument("--pair", required=True, help="name of a registered pair, or a .toml file")
    parser.add_argument("--out", type=Path, required=True, help="folder for the exported pair")
    options = parser.parse_args(arguments)
    try:
        path, parity = export_query_side(load_pair(options.pair), options.out)
    except CareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"parity  cosine {parity.cosine:.7f} to the checkpoint, "
        f"{parity.batch:.7f} of a text alone to it in a batch"
    )
    print(f"pair    {path}: set CARE_PAIR to it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
