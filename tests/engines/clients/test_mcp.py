"""`care-mcp` by the SDK's own client: as a child process over stdio, and over HTTP."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client, StdioServerParameters

import care_client
from care_client.mcp import KEY_VARIABLE, main, make_server
from core.service_process import free_port, running_server
from tests.engines.clients.conftest import DEPARTMENT, KEY, QUERY

PROGRAM = str(Path(sys.executable).with_name("care-mcp"))


@pytest.fixture(scope="module")
def http_url(url: str) -> Iterator[str]:
    """The address of `care-mcp --transport http`."""
    port = free_port()
    command = [PROGRAM, "--url", url, "--transport", "http", "--port", str(port)]
    address = f"http://127.0.0.1:{port}"
    environment = {**os.environ, KEY_VARIABLE: KEY}
    with running_server(command, address, "/health/live", environment=environment):
        yield f"{address}/mcp"


def stdio(url: str) -> StdioServerParameters:
    return StdioServerParameters(command=PROGRAM, args=["--url", url], env={KEY_VARIABLE: KEY})


def search(url: str, **options: Any) -> list[care_client.HitResponse]:
    with care_client.Client(url, api_key=KEY) as client:
        return client.search(QUERY, **options).hits


async def check(client: Client, url: str) -> None:
    """Checks tools, their results and errors."""
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(tools) == {"search", "get_passage", "list_filters"}
    assert tools["search"].input_schema["required"] == ["query"]
    for name, arguments in {"search": {"query": QUERY}, "get_passage": {"id": "1"}}.items():
        await check_unknown_argument(client, name, arguments)
    await check_unknown_argument(client, "list_filters", {})
    assert all(not tool.input_schema["additionalProperties"] for tool in tools.values())
    listed = await client.call_tool("list_filters", {})
    assert DEPARTMENT in listed.structured_content["filters"]["department"]
    options = {"top_k": 3, "filter": {"department": DEPARTMENT}}
    found = await client.call_tool("search", {"query": QUERY, **options})
    passages = found.structured_content["passages"]
    hits = search(url, **options)
    assert [each["id"] for each in passages] == [hit.id for hit in hits] != []
    assert passages[0]["text"] == hits[0].text
    assert passages[0]["metadata"]["department"] == DEPARTMENT
    assert passages[0]["metadata"]["evidence"]["text"] in passages[0]["text"]
    cited = await client.call_tool("get_passage", {"id": passages[0]["id"]})
    document = cited.structured_content
    assert (document["id"], document["text"]) == (passages[0]["id"], passages[0]["text"])
    assert document["metadata"]["department"] == DEPARTMENT
    assert document["index"] == found.structured_content["index"]
    for unknown in ("no-such-id", "", "a/b", "病历#0", "x" * 600):
        missing = await client.call_tool("get_passage", {"id": unknown})
        assert missing.is_error and "unknown_document" in missing.content[0].text
    none = await client.call_tool("search", {"query": QUERY, "min_score": 1.0})
    assert none.structured_content["passages"] == []
    wrong = await client.call_tool("search", {"query": QUERY, "filter": {"ward": 1}})
    assert wrong.is_error and "unknown_filter_field" in wrong.content[0].text
    quoted = await client.call_tool("search", {"query": QUERY, "filter": {"year": '{"gte": 1}'}})
    assert quoted.is_error and "filter.year" in quoted.content[0].text


async def check_unknown_argument(client: Client, name: str, arguments: dict[str, Any]) -> None:
    result = await client.call_tool(name, {**arguments, "limit": 3})
    assert result.is_error and {"limit", *arguments} <= set(
        re.findall(r"\w+", result.content[0].text)
    )


async def test_a_client_over_stdio(url: str) -> None:
    async with Client(stdio(url)) as client:
        await check(client, url)


async def test_a_client_over_http(http_url: str, url: str) -> None:
    async with Client(http_url) as client:
        await check(client, url)


def test_a_path_with_a_slash_too_many_is_unknown(http_url: str) -> None:
    """A redirect would lead from TLS to the host that the client names."""
    address = http_url.removesuffix("/mcp")
    for path in ("/mcp/", "/health/live/"):
        answer = httpx2.post(f"{address}{path}", headers={"Host": "evil.example"})
        assert (answer.status_code, "location" in answer.headers) == (404, False)
    assert httpx2.head(f"{address}/health/live").status_code == 200


async def test_a_client_of_an_older_protocol(url: str) -> None:
    async with Client(stdio(url), mode="legacy") as client:
        await check(client, url)


async def test_options_of_the_server_are_those_of_searches_without_them(open_url: str) -> None:
    server = make_server(open_url, options={"top_k": 2, "include": []})
    async with Client(server) as client:
        default = await client.call_tool("search", {"query": QUERY})
        named = await client.call_tool("search", {"query": QUERY, "top_k": 1})
    assert [each["text"] for each in default.structured_content["passages"]] == [None, None]
    assert len(named.structured_content["passages"]) == 1


async def test_without_a_service_a_tool_says_so() -> None:
    server = make_server(f"http://127.0.0.1:{free_port()}", timeout=0.5)
    async with Client(server) as client:
        result = await client.call_tool("search", {"query": QUERY})
    assert result.is_error and "connection_failed" in result.content[0].text


@pytest.mark.parametrize(
    "arguments",
    [["--options", "[1]"], ["--options", "{"], ["--timeout", "nan"], ["--url", "localhost:8000"]],
)
def test_a_wrong_option_is_an_error_of_the_command(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize(("closed", "status"), [("stdin", 0), ("stdout", 0), ("", -signal.SIGINT)])
def test_it_ends_silently_with_its_client_or_by_ctrl_c(closed: str, status: int) -> None:
    ping = b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n'
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([PROGRAM], **pipes) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(ping)
        process.stdin.flush()
        assert b'"id":1' in process.stdout.readline()
        if closed:
            getattr(process, closed).close()
        else:
            process.send_signal(signal.SIGINT)
        if closed == "stdout":
            process.stdin.write(ping)
            process.stdin.close()
        assert (process.wait(30), process.stderr.read()) == (status, b"")
