"""Reading of YAML. Requires pyyaml."""

from typing import Any

import yaml


def parse_yaml(text: str) -> Any:
    """Returns the value of a YAML text: mappings, lists and plain values.

    Raises:
        ValueError: If it is not YAML, is nested too deeply, or has a number or a date that cannot
            be read.
    """
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
