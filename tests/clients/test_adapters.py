"""What the retrievers of the frameworks return as metadata."""

from care_client.adapters import metadata
from care_client.models import HitResponse

HIT = HitResponse(id="1", score=0.9, rank=1, title="咖啡", metadata={"rank": "a", "year": 2024})


def test_fields_of_the_hit_replace_metadata_of_the_same_name() -> None:
    assert metadata(HIT) == {"score": 0.9, "rank": 1, "title": "咖啡", "year": 2024}


def test_documents_say_whether_anything_answers() -> None:
    assert metadata(HIT, 0.0)["answerable"] == 0.0
    assert "answerable" not in metadata(HIT, None)
