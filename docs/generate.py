"""Writes what documents take from the code and from the results of commands: `make docs`.

In a Markdown file, the lines between `<!-- generated: NAME -->` and `<!-- end of generated -->` are
the part NAME of this module, and those of `figures` a table of docs/figures.py. openapi.json
and the synchronous client of care-client are written as a whole.
"""

import html
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
# Also run as a script, whose folder is docs/.
sys.path.insert(0, str(DOCS.parent))
# unasync imports setuptools, which otherwise replaces distutils and fails if that is imported.
os.environ.setdefault("SETUPTOOLS_USE_DISTUTILS", "stdlib")

import typer  # noqa: E402
import unasync  # noqa: E402
from typer.cli import get_docs_for_click  # noqa: E402

import care  # noqa: E402
from care.cli.main import app  # noqa: E402
from docs.figures import TABLES  # noqa: E402
from service.app import openapi_document  # noqa: E402
from service.settings import Settings  # noqa: E402
from training.experiments import tables as experiments  # noqa: E402

SECURITY = DOCS.parent / "SECURITY.md"
CLIENT = DOCS.parent / "clients" / "python" / "care_client"
ABLATIONS = DOCS.parent / "training" / "recipes" / "ablations"
SCORES = DOCS.parent / "training" / "results" / "ablations" / "scores.json"
# Documents with generated parts.
DOCUMENTS = (
    DOCS.parent / "README.md",
    DOCS.parent / "README.zh.md",
    SECURITY,
    DOCS / "make-a-benchmark.md",
    DOCS / "reproduction.md",
    *(DOCS / "reference" / f"{name}.md" for name in ("settings", "cli", "http", "python")),
    *(DOCS.parent / "models" / name / "README.md" for name in ("care-mini", "care-mini-lookup")),
)
_REGION = re.compile(
    r"(<!-- (?P<kind>figures|generated): (?P<name>\S+) -->\n).*?(?P<end><!-- end of (?P=kind) -->)",
    re.DOTALL,
)
# Settings that bound what a request, a client or the service may use.
_LIMIT = r"^max_|timeout|^queue_|^rate_|_entries$|^keep_alive_|^drain_"
_CLIENT_NOTE = "# Generated from async_client.py by `make docs`; do not edit.\n"
# Names of the asynchronous client that the synchronous one has otherwise.
_SYNC_NAMES = {
    "AsyncClient": "Client",
    "AsyncConnections": "Connections",
    "aclose": "close",
    "aiter_bytes": "iter_bytes",
    "aiter_raw": "iter_raw",
    "async_until": "until",
    "asyncio": "time",
}
_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example|Examples):")
_PATH = re.compile(r"PosixPath\(('[^']*')\)")
_ENTRY = re.compile(r"(\*{0,2}\w+): (.*)")


def generated() -> Mapping[Path, str]:
    """Returns the text of each document with generated parts, by its path."""
    contract, paper = openapi_document(), experiments.read_tables(ABLATIONS)
    parts = {
        "settings": settings_table,
        "limits": lambda: settings_table(_LIMIT),
        "commands": commands,
        "http": lambda: "\n".join(http(contract)),
        "python": lambda: "\n".join(python()),
        "reproduction": lambda: experiments.render(paper, json.loads(SCORES.read_text("utf-8"))),
        "other-results": lambda: experiments.render_others(paper),
        **TABLES,
    }
    texts = {path: filled(path.read_text("utf-8"), parts) for path in DOCUMENTS}
    openapi = json.dumps(contract, indent=1, ensure_ascii=False) + "\n"
    return texts | {DOCS / "openapi.json": openapi, CLIENT / "client.py": sync_client()}


def sync_client() -> str:
    """Returns the module of the synchronous client."""
    with tempfile.TemporaryDirectory() as folder:
        source = shutil.copy(CLIENT / "async_client.py", folder)
        unasync.unasync_files([source], [unasync.Rule("async_client.py", "client.py", _SYNC_NAMES)])
        text = _CLIENT_NOTE + (Path(folder) / "client.py").read_text("utf-8")
    # Imports under other names have another order, and shorter code fits on fewer lines.
    for command in (["check", "--quiet", "--select=I", "--fix"], ["format"]):
        name = f"--stdin-filename={CLIENT / 'client.py'}"
        ruff = [sys.executable, "-m", "ruff", *command, name, "-"]
        text = subprocess.check_output(ruff, input=text, text=True)
    return text


def filled(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Returns a document with its regions written again by `parts`, functions by name."""

    def written(match: re.Match[str]) -> str:
        return f"{match[1]}\n{parts[match['name']]().strip()}\n\n{match['end']}"

    return _REGION.sub(written, text)


def settings_table(names: str = "") -> str:
    """Returns a Markdown table of the settings whose names match, in the order of the code."""
    prefix = Settings.model_config["env_prefix"]
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        if not re.search(names, name):
            continue
        if field.default_factory:
            default = "see meaning"
        elif field.default in (None, "", ()):
            default = "none"
        else:
            default = f"`{field.default}`"
        lines.append(f"| `{prefix}{name.upper()}` | {default} | {_line(field.description)} |")
    return "\n".join(lines)


def commands() -> str:
    """Returns help, arguments and options of each command, as `typer utils docs` writes them."""
    command = typer.main.get_command(app)
    _keep_summaries(command)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="care", indent=1)
    # It escapes quotes in prose, where Markdown needs no escape.
    return re.sub(r"&(#x27|quot);", lambda match: html.unescape(match[0]), text)


def _keep_summaries(command: Any) -> None:
    """Sets the summaries of subcommands, which are cut off after 45 characters otherwise."""
    for each in getattr(command, "commands", {}).values():
        each.short_help = inspect.cleandoc(each.help or "").split("\n\n")[0].replace("\n", " ")
        _keep_summaries(each)


def http(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of all routes, then those of the schemas that they name."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"## {method.upper()} {path}\n"
            yield f"{operation.get('description', operation['summary'])}\n"
            yield from _request(operation)
            responses = operation["responses"]
            content = responses["200"].get("content", {})
            schema = content.get("application/json", {}).get("schema")
            yield f"Response: {_type(schema) if schema else 'text'}\n"
            yield f"Errors: {', '.join(sorted(responses.keys() - {'200', '202'}))}\n"
    yield "## Schemas\n"
    for name, schema in document["components"]["schemas"].items():
        yield f"### {name}\n"
        if about := schema.get("description"):
            yield f"{about}\n"
        yield from _fields(schema)


def _request(operation: Mapping[str, Any]) -> Iterator[str]:
    key = "needed if keys are configured" if operation.get("security") else "not needed"
    yield f"Key: {key}.\n"
    for parameter in operation.get("parameters", []):
        about = parameter.get("description", "")
        yield f"{parameter['in'].title()} `{parameter['name']}`: {about}\n"
    if body := operation.get("requestBody"):
        yield f"Body: {_type(body['content']['application/json']['schema'])}\n"


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    properties = schema.get("properties")
    if not properties:
        yield f"{_type(schema)}\n"
        return
    required = schema.get("required", ())
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in properties.items():
        default = f"`{json.dumps(field['default'])}`" if "default" in field else "optional"
        default = "required" if name in required else default
        yield f"| `{name}` | {_type(field)} | {default} | {_line(field.get('description'))} |"
    yield ""


def _type(schema: Mapping[str, Any]) -> str:
    """Returns a schema's type in a few words, with links to named schemas."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{json.dumps(value, ensure_ascii=False)}`" for value in values)
    kind = schema.get("type", "any")
    if kind == "array":
        return f"array of {_type(schema['items'])}" if "items" in schema else "array"
    if kind == "object" and isinstance(values := schema.get("additionalProperties"), Mapping):
        return f"object of {_type(values)}"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None or high is not None:
        bounds = f"{'' if low is None else f'{low:g}'} to {'' if high is None else f'{high:g}'}"
        return f"{kind} ({bounds.strip()})" if high is not None else f"{kind} (from {low:g})"
    return str(kind)


def python() -> Iterator[str]:
    """Yields the lines of all public names of the package `care`."""
    values = {name: getattr(care, name) for name in care.__all__}
    for name, value in values.items():
        if not inspect.isclass(value):
            yield from _callable(f"care.{name}", value, "##")
    for name, value in values.items():
        if inspect.isclass(value):
            yield f"## care.{name}\n"
            yield from _docstring(inspect.getdoc(value) or "")
            for member, found in vars(value).items():
                if member.startswith("_"):
                    continue
                if isinstance(found, property):
                    yield f"### {name}.{member}\n"
                    yield from _docstring(inspect.getdoc(found) or "")
                elif inspect.isfunction(found):
                    yield from _callable(f"{name}.{member}", found, "###")


def _callable(name: str, value: Any, heading: str) -> Iterator[str]:
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(value).parameters.values()
        if parameter.name != "self"
    ]
    yield f"{heading} {name}\n"
    signature = _PATH.sub(r"\1", str(inspect.Signature(parameters)))
    yield f"`{name}{signature}`\n"
    yield from _docstring(inspect.getdoc(value) or "")


def _docstring(text: str) -> Iterator[str]:
    """Yields a Google docstring as Markdown: sections in bold, their entries as lists."""
    section = ""
    for line in text.splitlines():
        if match := _SECTION.fullmatch(line):
            section = match[1]
            yield f"**{section}**\n"
            if section.startswith("Example"):
                yield "```pycon"
        elif section.startswith("Example") and not line:
            yield "```\n"
            section = ""
        elif section.startswith("Example"):
            yield line.removeprefix("    ")
        elif section and (match := _ENTRY.fullmatch(line.removeprefix("    "))):
            yield f"- `{match[1]}`: {match[2]}"
        elif section and line:
            yield f"  {line.strip()}" if section not in ("Returns", "Yields") else line.strip()
        else:
            section = section if line else ""
            yield line
    yield "```\n" if section.startswith("Example") else ""


def _line(text: object) -> str:
    return " ".join(str(text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
