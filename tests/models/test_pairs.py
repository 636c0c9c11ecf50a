import os
import re
from pathlib import Path

import pytest

from core.encoders import EncoderSpec
from core.errors import PairError
from models.pairs import list_pairs, load_pair, write_pair
from tests.errors import raises

ZEROS = "0" * 64
SPEC = f"""
model = "m"
revision = "1"
weights = "m.onnx"
weights_sha256 = "{ZEROS}"
tokenizer = "tokenizer.json"
tokenizer_sha256 = "{ZEROS}"
dimension = 4
native_dimension = 8
max_length = 16
pooling = "cls"
normalize = true
prompt = ""
"""
PAIR = f"""
name = "p"
description = "d"
embedding_space = "space-1"
[query]{SPEC}
[document]{SPEC}
"""


def write(folder: Path, text: str) -> str:
    path = folder / "pair.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


REGISTERED = {
    "bge-base-zh-v1.5",
    "bge-large-zh-v1.5",
    "bge-m3",
    "bge-small-zh-v1.5",
    "care-mini",
    "care-mini-lookup",
    "conan-embedding-v1",
    "gte-base-zh",
    "gte-large-zh",
    "gte-multilingual-base",
    "gte-qwen2-1.5b",
    "gte-qwen2-7b",
    "qwen3-embedding-0.6b",
    "qwen3-embedding-4b",
    "qwen3-embedding-8b",
    "stella-base-zh-v3",
}
# Models whose model cards require an instruction for queries.
INSTRUCTED = ("bge-base", "bge-large", "bge-small", "gte-qwen2", "qwen3")


def test_the_pairs_of_the_paper_are_registered() -> None:
    assert set(list_pairs()) == REGISTERED


@pytest.mark.parametrize("name", list_pairs())
def test_each_registered_pair_is_valid(name: str) -> None:
    pair = load_pair(name)
    assert pair.name == name
    assert (pair.query.role, pair.document.role) == ("query", "document")
    assert pair.query.embedding_space == pair.document.embedding_space
    assert pair.query.dimension == pair.document.dimension
    for spec in (pair.query, pair.document):
        assert spec.dimension <= spec.native_dimension
        if spec.format == "transformers" and not spec.weights:
            assert re.fullmatch("[0-9a-f]{40}", spec.revision), "a branch is no identity"
    if pair.query.format == "transformers" and not pair.query.weights:
        differ = {"role", "prompt"}
        assert pair.query.model_dump(exclude=differ) == pair.document.model_dump(exclude=differ)
        assert bool(pair.query.prompt) == name.startswith(INSTRUCTED)
        assert pair.document.prompt == ""
        assert (pair.query.pooling == "last_token") == ("qwen" in name)


def test_only_pairs_with_the_same_document_encoder_share_an_embedding_space() -> None:
    documents: dict[str, set[str]] = {}
    for name in list_pairs():
        pair = load_pair(name)
        documents.setdefault(pair.embedding_space, set()).add(pair.document.model_dump_json())
    assert all(len(encoders) == 1 for encoders in documents.values())
    assert len(documents) == len(list_pairs()) - 1, "care-mini-lookup has the space of care-mini"


def test_a_pair_is_loaded_from_a_file_next_to_its_weights(tmp_path: Path) -> None:
    pair = load_pair(write(tmp_path, PAIR))
    assert (pair.name, pair.embedding_space, pair.folder) == ("p", "space-1", tmp_path)


@pytest.mark.parametrize(("name", "named"), [("none", True), ("run/pair.toml", False)])
def test_an_unknown_name_but_no_missing_file_names_the_registered_pairs(
    name: str, named: bool
) -> None:
    with raises(PairError, "unknown_pair", pair=name) as caught:
        load_pair(name)
    assert ("care-mini" in str(caught.value)) == named


def test_a_trained_pair_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked up before the registered pairs, in `CARE_PAIRS` or in pairs/."""
    for folder in ("pairs/mine", "elsewhere/mine", "elsewhere/care-mini"):
        (tmp_path / folder).mkdir(parents=True)
        write(tmp_path / folder, PAIR.replace('"p"', f'"{folder}"'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARE_PAIRS", "")
    assert load_pair("mine").name == "pairs/mine"
    assert load_pair("care-mini").name == "care-mini"
    monkeypatch.setenv("CARE_PAIRS", "elsewhere")
    assert load_pair("mine").name == "elsewhere/mine"
    assert load_pair("care-mini").name == "elsewhere/care-mini"
    assert load_pair("mine", Path("pairs")).folder == Path("pairs/mine")


def test_a_pair_that_is_not_trained_yet_says_where_it_is_looked_up(tmp_path: Path) -> None:
    with raises(PairError, "unknown_pair", pair="care-0.3b-8b") as caught:
        load_pair("care-0.3b-8b", tmp_path)
    assert str(tmp_path / "care-0.3b-8b" / "pair.toml") in str(caught.value)


SPEC_ITSELF = "EncoderSpec"


@pytest.mark.parametrize(
    ("old", "new", "code", "field"),
    [
        ('name = "p"', "", "missing_field", "name"),
        ("[document]", "[documents]", "missing_field", "document"),
        ('prompt = ""', 'prompt = ""\nrole = "query"', "bad_table", None),
        ('embedding_space = "space-1"', "", "missing_field", "embedding_space"),
        ("dimension = 4", "dimension = 0", "bad_field", "EncoderSpec.dimension"),
        ('pooling = "cls"', 'pooling = "max"', "bad_field", "EncoderSpec.pooling"),
        ('prompt = ""', 'prompt = ""\nprompts = ""', "bad_field", "EncoderSpec.prompts"),
        ('prompt = ""', 'prompt = ""\nbase_url = "http://a"', "bad_field", "EncoderSpec.base_url"),
        ("max_length = 16", "", "bad_field", "EncoderSpec.max_length"),
        ('name = "p"', "name = ", "not_toml", None),
        ('weights = "m.onnx"', "", "bad_field", SPEC_ITSELF),
        (f'tokenizer_sha256 = "{ZEROS}"', "", "bad_field", SPEC_ITSELF),
        (
            f'weights_sha256 = "{ZEROS}"',
            'weights_sha256 = "0"',
            "bad_field",
            "EncoderSpec.weights_sha256",
        ),
        ('prompt = ""', 'adapter = "lora"\nprompt = ""', "bad_field", SPEC_ITSELF),
        ('prompt = ""', 'config = {is_causal = false}\nprompt = ""', "bad_field", SPEC_ITSELF),
        ('weights = "m.onnx"', 'format = "transformers"', "bad_field", SPEC_ITSELF),
        ('prompt = ""', 'format = "gguf"\nprompt = ""', "bad_field", "EncoderSpec.format"),
    ],
)
def test_an_invalid_pair_file_is_an_error_that_names_the_field(
    tmp_path: Path, old: str, new: str, code: str, field: str | None
) -> None:
    path = write(tmp_path, PAIR.replace(old, new))
    with raises(PairError, code, path=path, field=field):
        load_pair(path)


@pytest.mark.parametrize(
    "text",
    ["x = " + "[" * 200_000, "x = " + "1" * 10_000, "x = '\udcff'", "x = 1\n" * 400_000],
    ids=["nested", "long number", "not UTF-8", "large"],
)
def test_a_file_that_cannot_be_parsed_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with raises(PairError, "unknown_pair" if len(text) > 1 << 20 else "not_toml"):
        load_pair(str(path))


def test_a_special_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.toml")
    with raises(PairError, "unknown_pair"):
        load_pair(str(tmp_path / "p.toml"))


def test_numbers_of_a_pair_are_finite(tmp_path: Path) -> None:
    for value in ("inf", "nan"):
        path = write(tmp_path, f"{PAIR}\n[fusion]\nlexical = {value}\n")
        with raises(PairError, "bad_field", field="Pair.fusion.lexical"):
            load_pair(path)


def test_a_checkpoint_needs_neither_files_nor_checksums(tmp_path: Path) -> None:
    files = [line for line in SPEC.splitlines() if line.startswith(("weights", "tokenizer"))]
    query, document = PAIR.split("[document]")
    for line in files:
        document = document.replace(f"{line}\n", "")
    checkpoint = 'format = "transformers"\nadapter = "lora"'
    pair = load_pair(write(tmp_path, f"{query}[document]\n{checkpoint}{document}"))
    assert (pair.query.format, pair.document.format) == ("onnx", "transformers")
    assert (pair.document.weights, pair.document.adapter) == ("", "lora")


def test_a_spec_without_format_is_onnx() -> None:
    written = load_pair("care-mini").document.model_dump(exclude={"format", "adapter"})
    assert EncoderSpec.model_validate(written) == load_pair("care-mini").document


def test_a_written_pair_round_trips(tmp_path: Path) -> None:
    pair = load_pair(write(tmp_path, PAIR))
    checkpoint = {"format": "transformers", "weights": "checkpoint", "adapter": "lora"}
    files = {"weights_sha256": "", "tokenizer": "", "tokenizer_sha256": ""}
    config = {"is_causal": False, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    query = pair.query.model_copy(update={"prompt": 'Instruct: "查"\nQuery: \\\t\x7f🙂'})
    document = pair.document.model_copy(update={**checkpoint, **files, "config": config})
    pair = pair.model_copy(update={"query": query, "document": document})
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere" / "my.toml"

    # An adapter that is not a local folder is a name on the Hugging Face Hub.
    for adapter in ("lora", "../lora"):
        write_pair(pair, path)
        read = load_pair(str(path))
        moved = {"weights": "../m.onnx", "tokenizer": "../tokenizer.json"}
        assert read.query == query.model_copy(update=moved)
        moved = {"weights": "../checkpoint", "adapter": adapter}
        assert read.document == document.model_copy(update=moved)
        assert (read.name, read.description) == (pair.name, pair.description)
        (tmp_path / "lora").mkdir(exist_ok=True)


def test_a_pair_is_written_to_and_read_from_folders_behind_links(tmp_path: Path) -> None:
    folders = [tmp_path / "weights" / "of pairs", tmp_path / "配对" / "deep" / "er"]
    links = [tmp_path / name for name in ("from", "to")]
    for link, folder in zip(links, folders, strict=True):
        folder.mkdir(parents=True)
        link.symlink_to(folder, target_is_directory=True)
    (folders[0] / "m.onnx").touch()
    write_pair(load_pair(write(links[0], PAIR)), links[1] / "my.toml")
    pair = load_pair(str(links[1] / "my.toml"))
    assert (pair.folder / pair.query.weights).samefile(folders[0] / "m.onnx")


def test_a_byte_order_mark_is_no_part_of_a_pair(tmp_path: Path) -> None:
    path = tmp_path / "pair.toml"
    write_pair(load_pair("care-mini"), path)
    content = path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + content)
    loaded, registered = load_pair(str(path)), load_pair("care-mini")
    assert loaded.query.embedding_space == registered.query.embedding_space
