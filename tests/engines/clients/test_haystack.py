"""The component of Haystack, in its own pipeline."""

import asyncio
import copy
import pickle

import pytest
from haystack import Pipeline
from haystack.components.builders import PromptBuilder
from haystack.utils import Secret

from care_client import Client
from care_client.haystack import CareRetriever
from tests.engines.clients.conftest import DEPARTMENT, KEY, QUERY


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> Secret:
    monkeypatch.setenv("RETRIEVER_KEY", KEY)
    return Secret.from_env_var("RETRIEVER_KEY")


def test_documents_have_ids_texts_scores_and_metadata(url: str, secret: Secret) -> None:
    filter_ = {"department": DEPARTMENT}
    with Client(url, api_key=KEY) as client:
        hits = client.search(QUERY, top_k=3, filter=filter_).hits
    retriever = CareRetriever(url, api_key=secret, top_k=3, filter=filter_)
    documents = retriever.run(QUERY)["documents"]
    assert [each.id for each in documents] == [hit.id for hit in hits] != []
    assert [each.score for each in documents] == [hit.score for hit in hits]
    assert documents[0].content == hits[0].text
    assert {each.meta["department"] for each in documents} == {DEPARTMENT}
    assert retriever.run(QUERY, options={"top_k": 1})["documents"] == documents[:1]


def test_a_pipeline_runs_and_is_restored_from_its_file(url: str, secret: Secret) -> None:
    pipeline = Pipeline()
    pipeline.add_component("retriever", CareRetriever(url, api_key=secret, top_k=2))
    template = "{% for each in documents %}{{ each.id }} {% endfor %}{{ query }}"
    pipeline.add_component("prompt", PromptBuilder(template, required_variables="*"))
    pipeline.connect("retriever.documents", "prompt.documents")
    inputs = {"retriever": {"query": QUERY}, "prompt": {"query": QUERY}}
    prompt = pipeline.run(inputs)["prompt"]["prompt"]
    assert prompt.endswith(QUERY) and len(prompt.split()) == 3
    saved = pipeline.dumps()
    assert "RETRIEVER_KEY" in saved and f" {KEY}\n" not in saved
    restored = Pipeline.loads(saved, allowed_modules=["care_client.haystack"])
    assert asyncio.run(restored.run_async(inputs))["prompt"]["prompt"] == prompt


def test_a_copy_finds_the_same_documents(url: str, secret: Secret) -> None:
    retriever = CareRetriever(url, api_key=secret, top_k=2)
    found = retriever.run(QUERY)
    for each in (copy.deepcopy(retriever), pickle.loads(pickle.dumps(retriever))):
        assert each.run(QUERY) == found
