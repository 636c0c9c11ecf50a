import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance

from service.app import openapi_document
from tests.conftest import ADMIN_KEY, SEARCH_KEY
from tests.service.conftest import ADMIN
from tests.service_process import run_service

DOCS = Path(__file__).parents[2] / "docs"

# What the schema cannot say: white space is no query, filters name fields of the index.
BEYOND_THE_SCHEMA = [positive_data_acceptance]

TIMEOUT = "X-Request-Timeout-Ms"

schema = schemathesis.openapi.from_dict(openapi_document())


def test_the_committed_contract_is_that_of_the_code() -> None:
    text = runpy.run_path(str(DOCS / "openapi.py"))["openapi_text"]()
    assert (DOCS / "openapi.json").read_text("utf-8") == text, "run make docs"


@pytest.fixture(scope="module")
def closed_url(indexes: Path) -> Iterator[str]:
    """The address of a service that asks for keys."""
    with run_service(indexes, "sample", API_KEYS=f"{ADMIN_KEY},{SEARCH_KEY}") as address:
        yield address


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_the_service_keeps_its_contract(case: Case, closed_url: str) -> None:
    """No 5xx, every status documented, every answer of its schema."""
    response = case.call(base_url=closed_url, headers=ADMIN)
    excluded = list(BEYOND_THE_SCHEMA)
    if response.status_code == 504 and TIMEOUT in (case.headers or {}):
        # Who asks for an answer within a millisecond may be told that it took longer.
        excluded.append(not_a_server_error)
    case.validate_response(response, excluded_checks=excluded)
