import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    negative_data_rejection,
    positive_data_acceptance,
)

from core.service_process import running_service
from service.app import openapi_document
from tests.conftest import ADMIN_KEY, SEARCH_KEY
from tests.service.conftest import ADMIN

pytestmark = pytest.mark.e2e

# Conditions outside of the schema: a query is not blank, filters use fields of the index.
BEYOND_THE_SCHEMA = [positive_data_acceptance]

TIMEOUT = "X-Request-Timeout-Ms"

schema = schemathesis.openapi.from_dict(openapi_document())


@pytest.fixture(scope="module")
def closed_url(indexes: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service that requires API keys, over a copy that requests may change."""
    own = Path(shutil.copytree(indexes, tmp_path_factory.mktemp("contract") / "indexes"))
    keys = f"{ADMIN_KEY},{SEARCH_KEY}"
    # A busy machine may need more than the default deadline, after which the status is 504.
    with running_service(own, "sample", API_KEYS=keys, TIMEOUT_MS="60000") as service:
        yield service.url


@schema.parametrize()
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_the_service_conforms_to_its_openapi_schema(case: Case, closed_url: str) -> None:
    """No status 5xx, all statuses documented, all responses valid under their schemas."""
    response = case.call(base_url=closed_url, headers=ADMIN)
    excluded = list(BEYOND_THE_SCHEMA)
    if response.status_code == 504 and TIMEOUT in (case.headers or {}):
        # A request with a deadline of a millisecond may get 504.
        excluded.append(not_a_server_error)
    if response.status_code in (200, 202) and case.method == "PUT":
        # Of a list, documents that break a rule are rejected one by one, by the answer or later.
        excluded.append(negative_data_rejection)
    case.validate_response(response, excluded_checks=excluded)
