"""Errors cross processes: each class of the project survives pickle and copy with what it says."""

import copy
import importlib
import inspect
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from care_client.errors import CareClientError
from care_client.models import FieldError
from core.errors import CareError, describe
from core.manifest import FileRecord

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients" / "python"
DEFINES_ERRORS = re.compile(r"^class [A-Z]\w*\([\w.]*(?:Error|Exception)\)", re.MULTILINE)


def error_classes() -> list[type[Exception]]:
    """The public exceptions of the packages, found in their text."""
    found: list[type[Exception]] = []
    packages = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"]
    for package in [*packages, CLIENT / "care_client"]:
        for path in sorted(package.rglob("*.py")):
            needs_torch = path.parent.name == "source"
            if needs_torch or not DEFINES_ERRORS.search(path.read_text("utf-8")):
                continue
            base = CLIENT if CLIENT in path.parents else ROOT
            name = ".".join(path.relative_to(base).with_suffix("").parts)
            module = importlib.import_module(name)
            found += [
                each
                for each in vars(module).values()
                if isinstance(each, type)
                and not each.__name__.startswith("_")
                and issubclass(each, Exception)
                and each.__module__ == name
            ]
    return found


def made(kind: type[Exception]) -> Exception:
    """An error of a class, with a value for each argument that it needs."""
    if issubclass(kind, CareClientError):
        fields = [FieldError(field="top_k", code="top_k_too_large", limit=100)]
        return kind(
            "a message", code="c", status=422, errors=fields, request_id="r", retry_after=1.5
        )
    if not issubclass(kind, CareError):
        return kind("a message")
    parameters = inspect.signature(kind, eval_str=True).parameters.values()
    needed = [
        3 if each.annotation is int else "invalid_json"
        for each in parameters
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    takes_fields = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return kind(*needed, **({"path": "a.jsonl", "line": 3} if takes_fields else {}))


def duplicates(error: Exception) -> Iterator[Any]:
    yield copy.copy(error)
    yield copy.deepcopy(error)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.loads(pickle.dumps(error, protocol))


def test_the_errors_of_the_project_are_found() -> None:
    assert len(error_classes()) > 20 and {CareError, CareClientError} <= set(error_classes())


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_an_error_survives_pickle_and_copy(kind: type[Exception]) -> None:
    error = made(kind)
    error.add_note("a note")
    for found in duplicates(error):
        assert type(found) is kind and str(found) == str(error)
        assert found.args == error.args and vars(found) == vars(error)


def fail(kind: type[Exception]) -> None:
    raise made(kind)


def test_an_error_of_a_worker_does_not_break_its_pool() -> None:
    with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
        for kind in (CareError, CareClientError):
            with pytest.raises(kind) as caught:
                pool.submit(fail, kind).result()
            assert vars(caught.value) | {"__notes__": []} == vars(made(kind)) | {"__notes__": []}


def test_a_log_line_says_which_value_a_model_refused_and_not_the_value() -> None:
    secret = int("-815")
    with pytest.raises(ValidationError) as caught:
        FileRecord(bytes=secret, sha256="")
    fields = describe(caught.value)
    assert fields["reason"] == "bytes greater_than_equal"
    assert str(secret) in str(caught.value) and str(secret) not in str(fields)
