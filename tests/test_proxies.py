"""Proxies of the environment: every client of the project leaves them aside on this machine."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pydantic import BaseModel, SecretStr

from care.diagnosis.serving import check_port, check_reranker
from core.breaker import Breaker
from core.errors import CareError
from core.loopback import open_local
from core.retries import RetryPolicy
from curation.config import Endpoint
from curation.llm import LanguageModels, Question
from curation.retrieval import search_run
from models.encoders.openai import OpenAIEncoder
from service.observe.tracing import ENDPOINT, make_tracer
from service.pipeline.rerank_server import RerankServer
from service.settings import Settings
from tests.errors import raises
from tests.models.encoders.embedding_server import SPEC
from tests.proxies import recording_server

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class Nothing(BaseModel):
    """An answer without fields."""


def encode(url: str, _: Path) -> None:
    OpenAIEncoder(SPEC, url, retries=RetryPolicy(retries=0))


def rerank(url: str, _: Path) -> None:
    async def scores() -> None:
        server = RerankServer(url, "", "", 10.0, Breaker())
        await server.scores("query", ["text"])
        await server.close()

    asyncio.run(scores())


def ask(url: str, folder: Path) -> None:
    endpoint = Endpoint(name="m", model="m", base_url=f"{url}/v1", retries=0)
    with LanguageModels([endpoint], folder / "calls.sqlite") as models:
        question = Question("1", "", "text", "", Nothing)
        assert models.ask({"m": [lambda: question]}, "test") == {"m": [Nothing()]}


def evaluate(url: str, _: Path) -> None:
    assert search_run(url, {"q": "text"}, 1) == {"q": {}}


FOLLOWING = [encode, rerank, ask, evaluate]


def trace(url: str, _: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENDPOINT, url)
        tracer = make_tracer()
    assert tracer
    tracer.record("/search", 200, {}, 0.1, {}, "id")
    tracer.close()


def open_(url: str, _: Path) -> None:
    with open_local(url, 10.0) as response:
        assert response.status == 200


def diagnose(url: str, _: Path) -> None:
    assert check_port(Settings(port=urlsplit(url).port or 0)).status == "ok"


def check_image(url: str, _: Path) -> None:
    """Runs the health check of the image."""
    found = re.search(
        r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", (ROOT / "Dockerfile").read_text(), re.M
    )
    assert found
    command = [sys.executable, *json.loads(found[1])[1:]]
    variables = os.environ | {"CARE_PORT": str(urlsplit(url).port)}
    subprocess.run(command, env=variables, check=True, timeout=60)


@pytest.fixture(params=["http_proxy", "ALL_PROXY", "socks"])
def proxied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The targets that reach the proxy of the environment."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("NO_PROXY", "elsewhere.example")
    with recording_server() as (port, targets):
        if request.param == "socks":
            monkeypatch.setenv("ALL_PROXY", f"socks5://127.0.0.1:{port}")
        else:
            monkeypatch.setenv(request.param, f"http://127.0.0.1:{port}")
        yield targets


@pytest.mark.parametrize("client", [*FOLLOWING, trace, open_, diagnose, check_image])
@pytest.mark.parametrize(
    ("proxied", "host"),
    [
        ("http_proxy", "127.0.0.1"),
        ("ALL_PROXY", "127.0.0.1"),
        ("ALL_PROXY", "localhost"),
        ("socks", "127.0.0.1"),
    ],
    indirect=["proxied"],
)
def test_requests_to_this_machine_pass_through_no_proxy(
    proxied: list[str], client: Callable[[str, Path], None], host: str, tmp_path: Path
) -> None:
    with recording_server() as (port, targets):
        client(f"http://{host}:{port}", tmp_path)
    assert targets
    assert all(target.startswith("/") for target in targets)
    assert proxied == []


@pytest.mark.parametrize("proxied", ["http_proxy", "ALL_PROXY"], indirect=True)
@pytest.mark.parametrize("client", [*FOLLOWING, trace])
def test_other_requests_pass_through_the_proxy(
    proxied: list[str], client: Callable[[str, Path], None], tmp_path: Path
) -> None:
    client("http://models.example:8080", tmp_path)
    assert proxied
    assert all(target.startswith("http://models.example:8080/") for target in proxied)


@pytest.mark.parametrize("proxied", ["http_proxy"], indirect=True)
@pytest.mark.parametrize("proxy", ["socks5://h:1", "ftp://h:1", "http://h:port"])
@pytest.mark.parametrize("client", FOLLOWING)
def test_a_proxy_that_cannot_be_used_is_an_error(
    proxied: list[str],
    client: Callable[[str, Path], None],
    proxy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.setitem(sys.modules, "socksio", None)
    with raises(CareError, code="bad_proxy"):
        client("http://models.example:8080", tmp_path)
    assert proxied == []


def test_care_doctor_reports_such_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "ftp://h:1")
    assert check_reranker(Settings(rerank_url=SecretStr("http://models.example"))).status == "error"
