"""Judges of `curation` on the server of vLLM: random grades, but valid JSON."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from curation.config import Endpoint, JudgingOptions
from curation.judging import LABELS, judge
from curation.llm import LanguageModels
from tests.checkpoints import write_qwen3
from tests.engines.vllm.server import KEY, vllm_server

MODEL = "tiny-chat"
LENGTH = 4096
# A random model would otherwise fill its response with white space.
STRUCTURED = {"backend": "xgrammar", "disable_any_whitespace": True}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}assistant: "
)
DOCUMENTS = {f"d{i}": f"第{i}段：高血压患者应当测量血压。" for i in range(5)}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a vLLM server with a tiny chat model."""
    folder = write_qwen3(tmp_path_factory.mktemp("chat"), ends_texts=False)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["max_position_embeddings"] = LENGTH
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    options = (
        *("--chat-template", str(template)),
        *("--structured-outputs-config", json.dumps(STRUCTURED)),
    )
    with vllm_server(folder, MODEL, LENGTH, folder / "server.log", options) as server:
        yield f"{server.url}/v1"


def test_grades_match_the_schema_and_are_not_requested_twice(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judges = [
        Endpoint(
            name=f"judge-{seed}",
            base_url=url,
            model=MODEL,
            api_key_env="JUDGE_KEY",
            concurrency=2,
            temperature=1.0,
            seed=seed,
            max_tokens=256,
        )
        for seed in (1, 2)
    ]
    for run in range(2):
        with LanguageModels(judges, tmp_path / "calls.sqlite") as models:
            judgements = judge(
                models,
                [endpoint.name for endpoint in judges],
                {"q1": list(DOCUMENTS), "q2": ["d1"]},
                {"q1": "高血压怎么办？", "q2": "骨折怎么办？"},
                DOCUMENTS,
                JudgingOptions(passages_per_call=3),
            )
            costs = models.costs()["all"]
            assert not models.invalid
        assert len(judgements) == 6
        grades = {grade for item in judgements for grade in item.grades.values()}
        assert grades <= set(LABELS["grade"])
        assert costs["calls"] == costs["answered"] == 6
        assert costs["reused"] == 6 * run
        assert costs["prompt_tokens"] > 1000
