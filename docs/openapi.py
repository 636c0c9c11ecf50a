"""Writes docs/openapi.json, the contract of the service, from its routes."""

import json
from pathlib import Path

from service.app import openapi_document

FILE = Path(__file__).parent / "openapi.json"


def openapi_text() -> str:
    """Returns the OpenAPI document as it is committed."""
    return json.dumps(openapi_document(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(openapi_text(), encoding="utf-8")
