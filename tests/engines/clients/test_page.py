"""The blocks of docs/clients.md that need a framework, in this environment."""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from tests.docs.pages import Block, blocks
from tests.engines.clients.conftest import QUERY, ROOT

PAGE = ROOT / "docs" / "clients.md"
URL = "http://127.0.0.1:8000"
MARKED = [block for block in blocks(PAGE) if (block.mark, block.value) == ("needs", "clients")]
SNIPPETS = [block for block in MARKED if block.language == "python"]


@pytest.mark.parametrize("block", SNIPPETS, ids=str)
def test_a_snippet_prints_something(
    block: Block, open_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert URL in block.text
    # The index of these tests has other passages than that of the page.
    exec(compile(block.text.replace(URL, open_url), str(block), "exec"), {})
    assert capsys.readouterr().out.strip() not in ("", "[]")


def test_a_snippet_has_at_most_ten_lines() -> None:
    assert len(SNIPPETS) == 4
    assert max(block.text.count("\n") for block in SNIPPETS) <= 10


def test_the_extras_that_the_page_installs_exist() -> None:
    project = tomllib.loads((ROOT / "clients" / "python" / "pyproject.toml").read_text("utf-8"))
    text = PAGE.read_text("utf-8")
    named = set(re.findall(r"(?:care-client|clients/python)\[([a-z-]+)\]", text))
    assert named == set(project["project"]["optional-dependencies"])


async def test_the_configuration_of_an_agent_starts_the_server(open_url: str) -> None:
    (block,) = [each for each in blocks(PAGE) if "mcpServers" in each.text]
    facts: dict[str, Any] = json.loads(block.text.replace(URL, open_url))["mcpServers"]["care"]
    facts["command"] = str(Path(sys.executable).with_name(facts["command"]))
    async with Client(StdioServerParameters(**facts)) as client:
        found = await client.call_tool("search", {"query": QUERY})
    assert found.structured_content["passages"]
