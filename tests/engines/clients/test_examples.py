"""The examples, as commands, against the real service and a scripted chat server."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import nbclient
import nbformat
import pytest

from care_client import Client
from examples import rag
from examples.rag import REFUSAL
from tests.curation.endpoints import Body, scripted_server, send_json
from tests.engines.clients.conftest import QUERY, ROOT

Reply = Callable[[Body], dict[str, Any]]


def run_example(name: str, reply: Reply, *arguments: str) -> tuple[str, list[Body]]:
    """Returns what an example prints, and what it asked the chat server."""
    asked: list[Body] = []

    def respond(body: Body, handler: BaseHTTPRequestHandler) -> None:
        asked.append(body)
        message = {"role": "assistant", "content": None, **reply(body)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        fields = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        send_json(handler, 200, {**fields, "choices": [choice]})

    with scripted_server(respond) as chat:
        done = subprocess.run(
            [sys.executable, f"examples/{name}", *arguments, "--chat", chat, "--model", "m"],
            cwd=ROOT,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout, asked


def first_hit(url: str) -> str:
    with Client(url) as client:
        return client.search(QUERY, top_k=1).hits[0].id


def test_rag_answers_with_the_passages_that_it_cites(open_url: str) -> None:
    def reply(body: Body) -> dict[str, Any]:
        passages = body["messages"][-1]["content"]
        assert QUERY in passages and re.search(r"^\[5\] ", passages, re.MULTILINE)
        return {"content": "每天的盐不超过五克[1]。"}

    output, asked = run_example("rag.py", reply, QUERY, "--url", open_url, "--min-score", "0.3")
    answer, source = output.splitlines()
    assert answer == "每天的盐不超过五克[1]。" and len(asked) == 1
    assert source.split()[:2] == ["[1]", first_hit(open_url)]


@pytest.mark.parametrize("text", ["少吃盐。", "少吃盐[9]。", ""])
def test_rag_refuses_an_answer_without_a_valid_citation(open_url: str, text: str) -> None:
    output, asked = run_example(
        "rag.py", lambda _: {"content": text}, QUERY, "--url", open_url, "--min-score", "0.3"
    )
    assert output.splitlines() == [REFUSAL] and asked


def test_rag_refuses_without_the_model_if_no_passage_has_the_score(open_url: str) -> None:
    output, asked = run_example(
        "rag.py", lambda _: {"content": "[1]"}, QUERY, "--url", open_url, "--min-score", "0.999"
    )
    assert output.splitlines() == [REFUSAL] and not asked


def test_rag_gives_a_passage_without_a_title_as_its_text(open_url: str) -> None:
    chat = MagicMock()
    chat.chat.completions.create.return_value.choices[0].message.content = "少吃盐[1]。"
    with Client(open_url) as client:
        found = client.search(QUERY, top_k=1)
    hit = found.hits[0].model_copy(update={"title": ""})
    search = MagicMock(search=lambda *_, **__: found.model_copy(update={"hits": [hit]}))
    assert rag.answer(QUERY, search, chat, "m", thresholds={}).sources == {1: hit}
    given = chat.chat.completions.create.call_args.kwargs["messages"][-1]["content"]
    assert f"\n[1] {hit.text}\n" in given


def test_rag_refuses_without_the_model_what_nothing_in_the_index_answers(open_url: str) -> None:
    model = MagicMock()
    with Client(open_url) as client:
        found = client.search(QUERY, top_k=3).model_copy(update={"answerable": 0.2})
        search = MagicMock(search=lambda *_, **__: found)
        refused = rag.answer(QUERY, search, model, "m", thresholds={found.mode: 0.3})
        assert refused.text == REFUSAL and not model.mock_calls
        model.chat.completions.create.return_value.choices[0].message.content = "少吃盐[1]。"
        answered = rag.answer(QUERY, search, model, "m", thresholds={found.mode: 0.1})
        assert answered.text == "少吃盐[1]。"


def test_an_agent_searches_by_mcp_and_answers(open_url: str) -> None:
    def reply(body: Body) -> dict[str, Any]:
        last = body["messages"][-1]
        if last["role"] == "user":
            names = {tool["function"]["name"] for tool in body["tools"]}
            assert names == {"search", "get_passage", "list_filters"}
            arguments = json.dumps({"query": QUERY, "top_k": 1})
            function = {"name": "search", "arguments": arguments}
            return {"tool_calls": [{"id": "c", "type": "function", "function": function}]}
        (passage,) = json.loads(last["content"])["passages"]
        return {"content": f"少吃盐 [{passage['id']}]"}

    output, asked = run_example("agent.py", reply, QUERY, "--url", open_url)
    assert output == f"少吃盐 [{first_hit(open_url)}]\n" and len(asked) == 2


def test_the_notebook_of_ones_own_corpus(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "search-your-corpus.ipynb", as_version=4)
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=folder).execute()
    values = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "execute_result"
    ]
    assert "'fever'" in values[3] and "'back'" not in values[3]
    assert list(ast.literal_eval(values[4]).values()) == ["coffee", "fever", "back"]
