"""What a running service writes to standard error: JSON lines only, without query text."""

import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from core.service_process import running_service

pytestmark = pytest.mark.e2e

SECRET = "绝密病历"


def test_all_lines_are_json_uvicorns_too(indexes: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with running_service(indexes, "sample", LOG_LEVEL="debug") as service:
        with httpx2.Client(base_url=service.url) as client:
            assert client.post("/search", json={"query": SECRET}).status_code == 200
            assert client.post("/search", json={"query": SECRET * 999}).status_code == 422
            assert client.get("/health/ready").status_code == 200
            assert client.get("/metrics").status_code == 200
        address = urlsplit(service.url)
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(b"no HTTP\r\n\r\n")
            assert b"400" in connection.recv(1000)
        assert service.stop() == 0
    err = capfd.readouterr().err
    assert SECRET not in err
    lines = [json.loads(line) for line in err.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert {"care.service", "uvicorn.error"} <= {line["logger"] for line in lines}
    assert [line["route"] for line in lines if line.get("status") == 400] == ["unmatched"]
    probes = [line for line in lines if line.get("route") in ("/health/ready", "/metrics")]
    assert [line["level"] for line in probes] == ["debug", "debug"]
    searches = [line for line in lines if line.get("route") == "/search"]
    assert [(line["level"], line["status"]) for line in searches] == [("info", 200), ("info", 422)]
