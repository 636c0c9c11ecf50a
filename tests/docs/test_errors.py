"""reference/errors.md lists each error code of the source, and none that does not exist."""

import ast
import re
from collections.abc import Iterator

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "reference" / "errors.md"
PACKAGES = (
    *("care", "core", "curation", "deploy", "evaluation", "indexer", "loadtest", "models"),
    *("search", "service", "stores", "training", "clients/python/care_client"),
)
CODE = re.compile(r"[a-z]+(_[a-z0-9]+)*")
# Functions that make an error: the code is the last or the first argument.
LAST = re.compile(r"(\.at|[Ee]rror|_failure|_invalid|_unusable)$")
FIRST = re.compile(r"(RequestError|_reject|_wrong)$")
ASSIGNED = {"code", "default_code"}
TABLES = {"_CODES"}
# Codes that are made from the kind of what is wrong, and names of HTTP statuses.
COMPOSED = {"unknown_query", "unknown_document", "no_examples", "no_texts", "http_STATUS"}
STATUSES = {"not_found", "method_not_allowed"}
# A kind of errors of Redis, in metrics, and of a field, as pydantic names it.
NO_CODES = {"value", "value_error"}


def listed() -> set[str]:
    """The codes in the columns of codes of the tables."""
    codes: set[str] = set()
    column = 0
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if "code" in cells:
            column = cells.index("code")
        elif line.startswith("|"):
            codes.update(re.findall(r"`(\w+)`", cells[column]))
    return codes


def nodes() -> Iterator[ast.AST]:
    """All nodes of the source."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            yield from ast.walk(ast.parse(path.read_text("utf-8")))


def raised() -> set[str]:
    """The codes that errors are made with."""
    return {code for node in nodes() for code in _codes(node) if CODE.fullmatch(code)}


def _codes(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.keyword) and node.arg == "code":
        yield from _texts(node.value)
    elif isinstance(node, ast.Call):
        maker = ast.unparse(node.func)
        if node.args and (FIRST.search(maker) or LAST.search(maker)):
            yield from _texts(node.args[0 if FIRST.search(maker) else -1])
    elif isinstance(node, ast.FunctionDef):
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if argument.arg == "code" and default:
                yield from _texts(default)
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from _assigned(target, node.value)


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name) and target.id in ASSIGNED:
        yield from _texts(value)
    elif isinstance(target, ast.Name) and target.id in TABLES and isinstance(value, ast.Dict):
        for item in value.values:
            yield from _texts(item)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for part, item in zip(target.elts, value.elts, strict=True):
            yield from _assigned(part, item)


def _texts(value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.IfExp):
        yield from _texts(value.body)
        yield from _texts(value.orelse)
    elif isinstance(value, ast.Call) and ast.unparse(value.func).endswith(".get"):
        yield from _texts(value.args[-1])


def test_each_code_of_the_source_is_listed() -> None:
    assert sorted(raised() - listed() - NO_CODES) == []


def test_each_listed_code_exists() -> None:
    written = {text for node in nodes() if isinstance(node, ast.Constant) for text in _texts(node)}
    assert sorted(listed() - written - COMPOSED - STATUSES) == []
