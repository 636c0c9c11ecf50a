"""Real reverse proxies with the examples of deploy/ in front of the real service."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import care_client
from core.service_process import free_port, running_server, running_service
from tests.conftest import ADMIN_KEY
from tests.deploy.tools import DEPLOY, PRIVATE, find
from tests.service.conftest import UNUSUAL_IDS

pytestmark = [pytest.mark.deploy, pytest.mark.e2e]

# nginx decodes a path before it resolves these segments.
RESOLVED = {".", "..", "a/../b"}

NGINX = """
daemon off;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{server}
}}
"""


@pytest.fixture(scope="module")
def service(indexes: Path) -> Iterator[str]:
    with running_service(indexes, "test", ROOT_PATH="/care", API_KEYS=ADMIN_KEY) as service:
        yield service.url


def caddy(folder: Path, address: str, service: str) -> list[str]:
    """Returns the command of Caddy with deploy/Caddyfile, without TLS."""
    text = (DEPLOY / "Caddyfile").read_text()
    assert "search.example.com {" in text
    text = text.replace("search.example.com {", f"http://{address} {{")
    text = text.replace("127.0.0.1:8000", service.removeprefix("http://"))
    config = folder / "Caddyfile"
    config.write_text("{\n\tadmin off\n}\n" + text)
    return [find("caddy"), "run", "--adapter", "caddyfile", "--config", str(config)]


def nginx(folder: Path, address: str, service: str) -> list[str]:
    """Returns the command of nginx with deploy/nginx.conf, without TLS."""
    lines = (DEPLOY / "nginx.conf").read_text().splitlines()
    server = "\n".join(line for line in lines if not line.strip().startswith("ssl_certificate"))
    assert "listen 443 ssl;" in server
    server = server.replace("listen 443 ssl;", f"listen {address};")
    server = server.replace("http://127.0.0.1:8000/", f"{service}/")
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, server=server))
    return [find("nginx"), "-p", str(folder), "-e", "stderr", "-c", str(config)]


@pytest.fixture(scope="module", params=[caddy, nginx], ids=["caddy", "nginx"])
def proxy(
    request: pytest.FixtureRequest, service: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("proxy")
    address = f"127.0.0.1:{free_port()}"
    command = request.param(folder, address, service)
    environment = os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with running_server(command, f"http://{address}", "/care/", environment=environment) as server:
        yield server.url


def get(url: str, headers: Mapping[str, str] | None = None) -> str:
    request = urllib.request.Request(url, headers=dict(headers or {}))
    with urllib.request.urlopen(request, timeout=60) as response:
        body: bytes = response.read()
        return body.decode()


def status(request: urllib.request.Request) -> int:
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=60)
    with error.value as response:
        return response.code


def test_the_page_is_under_the_prefix(proxy: str) -> None:
    page = get(f"{proxy}/care")  # redirected to /care/
    assert "<form" in page


@pytest.mark.parametrize("path", [*PRIVATE, "//metrics", "/./metrics", "/a/../docs", "/%6detrics"])
def test_metrics_and_documentation_are_not_published(proxy: str, path: str) -> None:
    request = urllib.request.Request(f"{proxy}/care{path}")
    request.add_header("Authorization", "Bearer secret")
    assert status(request) == 404


def test_documents_are_found_by_their_ids(proxy: str) -> None:
    with care_client.Client(f"{proxy}/care", api_key="secret") as client:
        for id_ in set(UNUSUAL_IDS) - RESOLVED:
            assert client.document(id_).id == id_


def test_a_search_needs_a_key_and_returns_hits(proxy: str) -> None:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    body = json.dumps({"query": "高血压", "top_k": 3}).encode()
    request = urllib.request.Request(f"{proxy}/care/search", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert len(json.load(response)["hits"]) == 3
    request.remove_header("Authorization")
    assert status(request) == 401
