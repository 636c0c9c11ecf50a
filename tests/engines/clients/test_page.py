"""The blocks of README.md and docs/ that need a framework, in this environment."""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

import care
from core.service_process import running_service
from tests.curation.endpoints import Body, scripted_server
from tests.docs.pages import PAGES, Block, blocks
from tests.engines.clients.conftest import QUERY, ROOT

README, PAGE = ROOT / "README.md", ROOT / "docs" / "clients.md"
LIVE = ROOT / "docs" / "live-documents.md"
URL, CHAT = "http://127.0.0.1:8000", "http://127.0.0.1:8001/v1"
SNIPPETS = {
    page: [block for block in blocks(page) if block.language == "python" and not block.runs]
    for page in PAGES
}


@pytest.fixture(scope="module", params=[README, PAGE, LIVE], ids=lambda page: page.stem)
def page(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.fixture(scope="module")
def page_url(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service with the documents that the page writes out."""
    folder = tmp_path_factory.mktemp(page.stem)
    lines = page.read_text("utf-8").splitlines()
    documents = [json.loads(line) for line in lines if line.startswith('{"_id"')]
    care.build_index("mine", documents, indexes=folder / "indexes", builds=folder / "builds")
    with running_service(folder / "indexes", "mine") as service:
        yield service.url


def run(block: Block, url: str, chat: str = CHAT) -> None:
    assert URL in block.text
    exec(compile(block.text.replace(URL, url).replace(CHAT, chat), str(block), "exec"), {})


def test_the_snippets_of_a_page_print_hits(
    page: Path, page_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for block in SNIPPETS[page]:
        if CHAT not in block.text:
            run(block, page_url)
            assert capsys.readouterr().out.strip() not in ("", "[]")


@pytest.mark.parametrize("page", [README], indirect=True, ids=["README"])
def test_the_chain_of_readme_cites_or_refuses(
    page_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chat model is asked about the question that has a passage, not about the other one."""
    (block,) = SNIPPETS[README]
    (refusal,) = re.findall(r'^REFUSAL = "(.*)"$', block.text, re.MULTILINE)
    asked: list[str] = []
    replies = iter(["血压很高时应避免[1]。", "血压很高时应避免[7]。", "血压很高时应避免。"])

    def respond(body: Body, _: BaseHTTPRequestHandler) -> str:
        asked.append(body["messages"][-1]["content"])
        return next(replies)

    with scripted_server(respond) as chat:
        run(block, page_url, chat)
        cited = ["血压很高时应避免[1]。", "[1] 咖啡与血压", refusal]
        assert capsys.readouterr().out.splitlines() == cited
        assert len(asked) == 1 and asked[0].startswith("[1] 咖啡因")
        for _ in range(2):  # a source that does not exist, and none
            run(block, page_url, chat)
            assert capsys.readouterr().out.splitlines() == [refusal, refusal]


def test_no_other_page_has_snippets_for_this_environment() -> None:
    marked = {page for page in PAGES for block in SNIPPETS[page] if block.value == "clients"}
    assert marked == {README, PAGE, LIVE}


def test_a_snippet_has_at_most_ten_lines() -> None:
    assert len(SNIPPETS[PAGE]) == 5
    assert max(block.text.count("\n") for block in SNIPPETS[PAGE]) <= 10


def test_the_table_has_the_lines_of_the_examples_and_the_tested_versions() -> None:
    requirements = (ROOT / "tests" / "engines" / "clients" / "requirements.txt").read_text("utf-8")
    examples = {
        "client": "import Client\n",
        "LangChain": "care_client.langchain",
        "LlamaIndex": "care_client.llama_index",
        "Haystack": "care_client.haystack",
        "agents": "mcpServers",
    }
    rows = re.findall(
        r"^\| (.+?) \| .* \| (\d+).*? \| (.*?) ?\|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    assert [name for name, _, _ in rows] == list(examples)
    for name, lines, tested in rows:
        text = next(block.text for block in blocks(PAGE) if examples[name] in block.text)
        assert int(lines) == sum(bool(line.strip()) for line in text.splitlines()), name
        assert not tested or tested.replace(" ", "==") in requirements.splitlines()


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
