"""Components of a version are changed without encoding: full text, its weight, term lists."""

from dataclasses import replace
from functools import partial

import pytest

from core.analysis import terms
from core.errors import EmbeddingSpaceError, IndexVersionError
from core.manifest import IndexManifest
from core.terms import TermList
from indexer.build import up_to_date
from indexer.publication import verify_version
from indexer.versions import prune
from stores.lexical import open_full_text
from stores.term_list import GIVEN, read_terms
from tests.encoders import make_spec
from tests.errors import raises
from tests.indexer.builds import edit_manifest, state
from tests.indexer.conftest import NEW, OLD, Index


@pytest.mark.parametrize("factory", ["HNSW8", "HNSW8,SQ8"])
def test_full_text_changes_without_a_new_file_of_vectors(index: Index, factory: str) -> None:
    base = index.build(OLD, factory=factory, builds=index.folder / "others")
    assert index.change(base) is None
    versions = [base]
    for full_text, weight in ((True, 0.25), (False, 0.0), (True, 0.5)):
        fusion = {"lexical": weight} if weight else {}
        manifest = index.change(versions[-1], full_text=full_text, fusion=fusion)
        assert manifest == verify_version(index.path(manifest))
        assert (manifest.files, manifest.canaries) == (base.files, base.canaries)
        assert (manifest.parent, manifest.number) == (versions[-1].version, len(versions) + 1)
        assert (manifest.fusion, "lexical" in manifest.components) == (fusion, full_text)
        assert (index.path(manifest) / "lexical").is_dir() == full_text
        files = [index.path(each) / "vectors.faiss" for each in (base, manifest)]
        assert files[0].samefile(files[1])
        versions.append(manifest)
    assert index.versions.active() == versions[-1].version
    # Links are independent of the versions that they were made from.
    prune(index.versions, index.options.builds, keep=1)
    assert index.versions.versions() == [versions[-1].version]
    assert verify_version(index.path(versions[-1])) == versions[-1]


def test_a_term_list_is_kept_replaced_and_removed(index: Index, old: IndexManifest) -> None:
    first, second = (TermList({word: ("高血压",)}) for word in ("压力大", "血压高"))
    listed = index.change(old, terms=first)
    assert index.change(listed, terms=first) is None
    assert listed.components["lexical"] == old.components["lexical"]
    assert read_terms(index.path(listed), listed, GIVEN) == first
    added = index.update(NEW, terms=first).manifest
    assert added.segments[0].folder == listed.version
    assert added.components == listed.components
    replaced = index.update(terms=second).manifest
    assert read_terms(index.path(replaced), replaced, GIVEN) == second
    removed = index.change(replaced)
    assert removed.components.keys() == {"lexical"}
    assert not (index.path(removed) / "terms").exists()


@pytest.mark.parametrize("documents", [False, True])
def test_full_text_of_an_older_release_is_searched_as_it_is_until_an_update(
    index: Index, monkeypatch: pytest.MonkeyPatch, documents: bool
) -> None:
    def found(manifest: IndexManifest) -> dict[str, list[int]]:
        full_text = open_full_text(index.path(manifest), manifest)
        assert full_text
        names = ("CA125", "CA-125")
        return {name: full_text.search(name, 2)[1].tolist() for name in names}

    records = [{"_id": str(i), "text": f"查{name}"} for i, name in enumerate(("CA-125", "CA125"))]
    with monkeypatch.context() as patch:
        patch.setattr("stores.lexical.terms", partial(terms, names=False))
        built = index.build(records)
    built.components["lexical"].settings.clear()
    edit_manifest(index.path(built), lambda m: m["components"]["lexical"].pop("settings"))
    old = verify_version(index.path(built))
    assert old == built
    assert found(old) == {"CA125": [1], "CA-125": [0]}
    # Nothing is encoded again because of it.
    corpus = replace(index.options, corpus=str(index.folder / "corpus.jsonl"))
    assert up_to_date(corpus, make_spec("document")) == old
    if documents:
        new = index.update(records[:1]).manifest
    else:
        new = index.change(old)
        assert new.files == old.files
    assert found(new) == {"CA125": [1, 0], "CA-125": [0, 1]}
    assert index.change(new) is None


def test_full_text_of_a_version_that_is_no_longer_active(index: Index, old: IndexManifest) -> None:
    index.build(NEW)
    before = state(index.options.indexes)
    with raises(IndexVersionError, "base_not_active"):
        index.change(old, full_text=False)
    with raises(EmbeddingSpaceError, "other_encoder"):
        index.change(old, "other", full_text=False)
    assert state(index.options.indexes) == before


def test_the_weight_changes_with_documents_that_do_not(index: Index, old: IndexManifest) -> None:
    manifest, encoded, _ = index.update(OLD[:5], fusion={"lexical": 0.25})
    assert (manifest.fusion, encoded, manifest.count) == ({"lexical": 0.25}, None, old.count)
    assert [entry.folder for entry in manifest.segments] == [old.version]
