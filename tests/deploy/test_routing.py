"""Real proxies in front of several services: which one gets a request."""

import json
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from core.service_process import ServerProcess, free_port, running_server, running_service
from tests.conftest import ADMIN_KEY
from tests.deploy.manifests import render
from tests.deploy.operations import needs_writer, operations
from tests.deploy.test_proxy import NGINX
from tests.deploy.tools import DEPLOY, PRIVATE, find
from tests.service.conftest import UNUSUAL_IDS, wait_until

pytestmark = [pytest.mark.deploy, pytest.mark.e2e]

HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
# A proxy resolves these segments of a path.
RESOLVED = {".", "..", "a/../b"}


@contextmanager
def stand_in(name: str) -> Iterator[str]:
    """Runs a server whose answers have its name and the request; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            size = len(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            told = {"by": name, "method": self.command, "path": self.path, "bytes": size}
            content = json.dumps(told).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def by_method(_: Path, address: str, service: str, writer: str) -> str:
    """Returns deploy/nginx.writer.conf with other addresses."""
    text = (DEPLOY / "nginx.writer.conf").read_text()
    for name, other in (
        ("listen 8080;", f"listen {address};"),
        (" service:8000;", f" {service};"),
        (" writer:8000;", f" {writer};"),
    ):
        assert name in text
        text = text.replace(name, other)
    return text


def by_path(folder: Path, address: str, service: str, writer: str) -> str:
    """Returns what the NGINX ingress controller makes of the Ingress: longest path first."""
    components = ["../../components/ingress", "../../components/one-writer"]
    rendered = render("overlays/example", folder / "deploy", components)
    (rule,) = rendered["Ingress", "care"]["spec"]["rules"]
    addresses = {"care": service, "care-writer": writer}
    locations = [
        f'location ~* "^{each["path"]}" {{\n'
        f'    rewrite "(?i){each["path"]}" /$1 break;\n'
        f"    proxy_pass http://{addresses[each['backend']['service']['name']]};\n}}"
        for each in sorted(rule["http"]["paths"], key=lambda one: -len(one["path"]))
    ]
    rest = "location / {\n    return 404;\n}"
    return "\n".join([f"server {{\nlisten {address};", *locations, rest, "}"])


@contextmanager
def running_nginx(folder: Path, server: str, address: str, root: str) -> Iterator[str]:
    """Runs nginx with the text of a block `server`; yields the address of the services."""
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, server=server))
    command = [find("nginx"), "-p", str(folder), "-e", "stderr", "-c", str(config)]
    with running_server(command, f"http://{address}", root + "/", environment=os.environ) as nginx:
        yield nginx.url + root


@pytest.fixture(
    scope="module", params=[(by_method, ""), (by_path, "/care")], ids=["method", "path"]
)
def proxy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder, address = tmp_path_factory.mktemp("routing"), f"127.0.0.1:{free_port()}"
    make, root = request.param
    with stand_in("service") as service, stand_in("writer") as writer:
        server = make(folder, address, service, writer)
        with running_nginx(folder, server, address, root) as url:
            yield url


def ask(url: str, method: str, path: str, body: Any = None) -> Any:
    """Returns the JSON of an answer, with its `status` if it is an error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, HEADERS, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return {"status": error.code}


def filled(path: str) -> str:
    return path.replace("{index}", "mine").replace("{id}", "7").replace("{model}", "care-mini")


PUBLISHED = [(method, path) for method, path in operations() if path not in PRIVATE]


@pytest.mark.parametrize(("method", "path"), PUBLISHED)
def test_each_operation_reaches_a_service_that_can_answer_it(
    proxy: str, method: str, path: str
) -> None:
    sent = filled(path)
    answer = ask(proxy, method, sent)
    assert (answer["method"], answer["path"]) == (method, sent)
    if needs_writer(method, path):
        assert answer["by"] == "writer"
    elif proxy.endswith("/care"):
        # Without methods, what reads a path that is also written reaches the writer too.
        written = any(needs_writer(*one) for one in PUBLISHED if one[1] == path)
        assert answer["by"] == ("writer" if written else "service")
    else:
        assert answer["by"] == "service"


@pytest.mark.parametrize("id_", sorted(set(UNUSUAL_IDS) - RESOLVED))
def test_documents_of_any_id_are_written_by_the_writer(proxy: str, id_: str) -> None:
    path = f"/indexes/mine/documents/{urllib.parse.quote(id_, safe='')}"
    assert ask(proxy, "DELETE", path)["by"] == "writer"


@pytest.mark.parametrize("path", PRIVATE)
def test_metrics_and_documentation_are_not_published(proxy: str, path: str) -> None:
    assert ask(proxy, "GET", path) == {"status": 404}


def test_a_file_of_any_length_reaches_the_writer(tmp_path: Path) -> None:
    address, lines = f"127.0.0.1:{free_port()}", b"{}\n" * 3_000_000
    with stand_in("service") as service, stand_in("writer") as writer:
        server = by_method(tmp_path, address, service, writer)
        with running_nginx(tmp_path, server, address, "") as url:
            request = urllib.request.Request(f"{url}/documents", lines, HEADERS, method="PUT")
            with urllib.request.urlopen(request, timeout=60) as response:
                answer = json.load(response)
    assert (answer["by"], answer["bytes"]) == ("writer", len(lines))


def writes(service: ServerProcess) -> float:
    """Returns the number of requests that a service let its writer process make."""
    with urllib.request.urlopen(f"{service.url}/metrics", timeout=60) as response:
        page = response.read().decode()
    lines = [line for line in page.splitlines() if line.startswith("care_writes_total{")]
    assert lines
    return sum(float(line.split()[-1]) for line in lines)


def test_a_document_that_one_service_writes_is_found_by_the_other(
    indexes: Path, tmp_path: Path
) -> None:
    """Two services of one folder, as with a shared volume."""
    how = {"API_KEYS": ADMIN_KEY, "WATCH_SECONDS": "0.2", "TIMEOUT_MS": "60000"}
    with ExitStack() as stack:
        service, writer = (
            stack.enter_context(running_service(indexes, "test", **how)) for _ in range(2)
        )
        address = f"127.0.0.1:{free_port()}"
        hosts = (each.url.removeprefix("http://") for each in (service, writer))
        server = by_method(tmp_path, address, *hosts)
        url = stack.enter_context(running_nginx(tmp_path, server, address, ""))

        def found() -> set[str]:
            body = {"query": "术后第一天可以下床吗", "top_k": 5}
            return {hit["id"] for hit in ask(url, "POST", "/search", body)["hits"]}

        new = {"_id": "new", "text": "术后第一天可在护士陪同下床活动。"}
        assert ask(url, "PUT", "/indexes/test/documents", new)["added"] == 1
        wait_until(lambda: "new" in found())
        accepted = ask(url, "POST", "/documents/delete?wait=accepted", {"ids": ["new"]})
        wait_until(lambda: ask(url, "GET", f"/writes/{accepted['id']}")["state"] == "written")
        wait_until(lambda: "new" not in found())
        assert (writes(service), writes(writer)) == (0, 2)
