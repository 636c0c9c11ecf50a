import asyncio
import io
import json
import logging
import subprocess
import sys

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from service.observe.logs import JsonFormatter, log_failure
from tests.conftest import SEARCH_KEY
from tests.service.conftest import Serve

SECRET = "绝密病历"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    formatter = JsonFormatter()
    records = [r for r in caplog.records if r.name == "care.service"]
    return [json.loads(formatter.format(record)) for record in records]


def test_each_request_is_logged_with_its_id_and_timings(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    client = serve(api_keys=SecretStr(SEARCH_KEY))
    caplog.set_level(logging.INFO)
    headers = {"X-Request-ID": "mine", "Authorization": "Bearer asks"}
    client.post("/search", json={"query": SECRET}, headers=headers)
    (line,) = lines(caplog)
    stages = line.pop("stages_ms")
    assert isinstance(stages, dict)
    assert list(stages) == ["cache", "queue", "tokenize", "encode", "search", "fetch"]
    assert line.pop("ms") >= sum(stages.values()) - 0.1
    assert line.pop("time")
    assert line == {
        "level": "info",
        "logger": "care.service",
        "message": "request",
        "request_id": "mine",
        "method": "POST",
        "route": "/search",
        "status": 200,
        "key": "app",
    }


@pytest.mark.parametrize("encoding", ["utf-8", "gbk", "ascii"])
def test_lines_are_json_for_each_text_and_encoding(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding, "backslashreplace")
    monkeypatch.setattr(sys, "stderr", stream)
    for text in ("头痛é😀", "\x7f\x9b\u202e\x1b", "undecodable name \udce9"):
        record = logging.makeLogRecord({"msg": text})
        line = JsonFormatter().format(record)
        assert line.isprintable()
        assert json.loads(line.encode(encoding).decode(encoding))["message"] == text


def test_the_path_of_an_unknown_route_is_not_logged(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client.get(f"/search/{SECRET}?q={SECRET}")
    (line,) = lines(caplog)
    assert (line["route"], line["status"], line["stages_ms"]) == ("unmatched", 404, {})


def test_requests_are_not_logged_above_info(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    client.post("/search", json={"query": SECRET})
    assert lines(caplog) == []


def failure() -> Exception:
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        return error


def test_an_error_is_logged_by_type_and_traceback_without_its_message() -> None:
    error = failure()
    record = logging.LogRecord(
        "uvicorn.error", logging.ERROR, __file__, 1, "Exception in %s", ("task",), None
    )
    record.exc_info = (type(error), error, error.__traceback__)
    text = JsonFormatter().format(record)
    line = json.loads(text)
    assert (line["message"], line["error"]) == ("Exception in task", "ValueError")
    assert "in failure" in line["traceback"]
    assert SECRET not in text


def test_unhandled_errors_of_tasks_are_logged_without_their_messages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.new_event_loop()
    log_failure(loop, {"message": f"Task failed: {SECRET}", "exception": failure()})
    log_failure(loop, {"message": SECRET})
    loop.close()
    first, second = lines(caplog)
    assert first["error"] == "ValueError"
    assert "error" not in second
    assert SECRET not in caplog.text + json.dumps([first, second], ensure_ascii=False)


def test_text_is_not_escaped() -> None:
    record = logging.makeLogRecord({"msg": "索引已换", "exc_info": None})
    assert "索引已换" in JsonFormatter().format(record)


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/metrics"])
def test_probes_are_logged_at_debug(
    client: TestClient, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level(logging.DEBUG)
    client.get(path)
    (line,) = lines(caplog)
    assert (line["level"], line["route"]) == ("debug", path)


def test_warnings_and_unhandled_errors_are_json_lines() -> None:
    code = f"""
import threading, warnings
from service.observe.logs import configure_logs
configure_logs("info")
warnings.warn("deprecated")
def fail(): raise ValueError("{SECRET}")
thread = threading.Thread(target=fail)
thread.start()
thread.join()
class Failing:
    def __del__(self): fail()
Failing()
fail()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    warning, of_thread, of_finalizer, last = map(json.loads, done.stderr.splitlines())
    assert (warning["level"], warning["logger"]) == ("warning", "py.warnings")
    assert "deprecated" in warning["message"]
    assert of_thread["error"] == of_finalizer["error"] == last["error"] == "ValueError"
    assert "in fail" in of_thread["traceback"]
    assert SECRET not in done.stderr
    assert done.returncode == 1
