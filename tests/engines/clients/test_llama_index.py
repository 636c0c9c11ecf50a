"""The retriever of LlamaIndex, in its own query engine."""

import asyncio
import copy
import pickle

from llama_index.core import get_response_synthesizer
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode

from care_client import Client
from care_client.llama_index import CareRetriever
from tests.engines.clients.conftest import DEPARTMENT, KEY, QUERY


def test_nodes_have_ids_texts_scores_and_metadata(url: str) -> None:
    filter_ = {"department": DEPARTMENT}
    with Client(url, api_key=KEY) as client:
        hits = client.search(QUERY, top_k=3, filter=filter_).hits
    retriever = CareRetriever(url, api_key=KEY, top_k=3, filter=filter_)
    nodes = retriever.retrieve(QUERY)
    assert [node.node_id for node in nodes] == [hit.id for hit in hits] != []
    assert [node.score for node in nodes] == [hit.score for hit in hits]
    assert nodes[0].get_content() == hits[0].text
    assert {node.metadata["department"] for node in nodes} == {DEPARTMENT}
    assert asyncio.run(retriever.aretrieve(QUERY)) == nodes


def test_a_query_engine_answers_from_the_nodes(url: str) -> None:
    retriever = CareRetriever(url, api_key=KEY, top_k=2)
    engine = RetrieverQueryEngine(
        retriever, response_synthesizer=get_response_synthesizer(llm=MockLLM(max_tokens=4))
    )
    response = engine.query(QUERY)
    assert [node.node_id for node in response.source_nodes] == [
        node.node_id for node in retriever.retrieve(QUERY)
    ]


def test_a_prompt_has_the_document_and_nothing_of_the_search(url: str) -> None:
    options = {"mode": "hybrid", "explain": True, "evidence": True}
    (node,) = CareRetriever(url, api_key=KEY, top_k=1, **options).retrieve(QUERY)
    names = {"score", "rank", "explain", "evidence"}
    assert names <= set(node.metadata)
    for mode in (MetadataMode.LLM, MetadataMode.EMBED):
        text = node.get_content(metadata_mode=mode)
        assert DEPARTMENT in text and node.metadata["title"] in text
        assert not names & {line.partition(":")[0] for line in text.splitlines()}


def test_a_copy_finds_the_same_nodes(url: str) -> None:
    retriever = CareRetriever(url, api_key=KEY, top_k=2)
    nodes = retriever.retrieve(QUERY)
    for each in (copy.deepcopy(retriever), pickle.loads(pickle.dumps(retriever))):
        assert each.retrieve(QUERY) == nodes
