"""Writes the documents that are generated from the code: `make docs`.

openapi.json, and in reference/ the pages of settings, command line, HTTP and Python API; besides,
the table of limits in SECURITY.md, reproduction.md from the scores of the ablations, and the
synchronous client of care-client from the asynchronous one.
"""

import html
import inspect
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
# Also run as a script, whose folder is docs/.
sys.path.insert(0, str(DOCS.parent))

import typer  # noqa: E402
import unasync  # noqa: E402
from typer.cli import get_docs_for_click  # noqa: E402

import care  # noqa: E402
from care.cli.main import app  # noqa: E402
from service.app import openapi_document  # noqa: E402
from service.settings import Settings  # noqa: E402
from training.experiments import tables as experiments  # noqa: E402

SECURITY = DOCS.parent / "SECURITY.md"
CLIENT = DOCS.parent / "clients" / "python" / "care_client"
ABLATIONS = DOCS.parent / "training" / "recipes" / "ablations"
SCORES = DOCS.parent / "training" / "results" / "ablations" / "scores.json"
_MARKED = re.compile(r"(<!-- limits:.*? -->\n).*?(<!-- end of limits -->)", re.DOTALL)
# Settings that bound what a request, a client or the service may use.
_LIMIT = r"^max_|timeout|^queue_|^rate_|_entries$|^keep_alive_|^drain_"
_NOTE = "<!-- Generated from the code by `make docs`; do not edit. -->\n"
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

_SETTINGS = """# Settings

The service reads these variables once, at start, and checks them before it loads a model. Any other
variable that begins with `CARE_`, in upper or lower case, is an error that names the nearest
setting, except `CARE_LOAD_KEY` of the load test and the variables that Kubernetes sets for Services
named `care…`. One of these is `CARE_PORT=tcp://10.0.0.1:8000`, of a Service named `care`: it is
ignored with a warning, also by the container's health check and by `make`. To avoid it, set
`enableServiceLinks: false` in the pod, as in `deploy/kubernetes`, rename the Service, or set
`CARE_PORT` in the pod.

Requests to servers that a setting or an option names follow `HTTP_PROXY`, `HTTPS_PROXY`,
`ALL_PROXY` and `NO_PROXY`, in upper or lower case. Requests to loopback addresses and `localhost`
never do.

The other commands read `CARE_INDEXES`, `CARE_BUILDS`, `CARE_INDEX`, `CARE_PAIR`, `CARE_MILVUS_URI`
and `CARE_MILVUS_TOKEN` as defaults of their options, and find trained pairs in `CARE_PAIRS`.
`make` reads `CARE_PORT`, `CARE_PAIR` and `CARE_INDEX`; `INDEX=` and `PAIR=` on its command line
override them.

"""
_CLI = """# Command line

`care` is the only command; `python -m care` is the same. With `--json` a command prints one JSON
object on standard output. Progress, warnings and hints go to standard error: bars on a terminal,
a line each 30 seconds in a log.

Characters that act on a terminal or change the direction of its text, and those that its encoding
lacks, are shown as escapes such as `\\x1b` and `\\u202e`; JSON stays valid in each encoding.

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | an error: `error: message [code]` on standard error ([errors.md](errors.md)) |
| 2 | wrong usage: an unknown option or a missing argument |
| 130 | interrupted by Ctrl-C |
| 141 | the program that reads the output, such as `head`, has ended |

Options whose environment variable is named take their default from it.

"""
_HTTP = """# HTTP

The contract is [openapi.json](../openapi.json); the running service shows it on `/docs`. Send JSON
with `Content-Type: application/json`, and the API key, if keys are configured, as
`Authorization: Bearer SECRET`.

The JSON is encoded in UTF-8, with or without a byte order mark, and may be compressed with
`Content-Encoding: gzip` or `deflate`. Null stands for the default of a field that has one. Routes
of GET answer HEAD too.

Every response has `X-Request-ID`. Errors are `application/problem+json` with a stable `code`;
[errors.md](errors.md#http) lists the codes.

"""
_PYTHON = """# Python API

The package `care` works in this process, without a server. Names that start with an underscore and
all other packages are internal.

Errors are `care.CareError` and its subclasses, with `code` and `fields` ([errors.md](errors.md)).

"""
_REPRODUCTION = """# Reproduction of the paper

The tables of the CARE paper (arXiv 2604.10937, first edition) beside the scores of this
repository's recipes. The paper trains encoders of 0.3, 4 and 8 billion parameters on 32 GPUs; these
recipes train encoders of up to twelve small layers on a processor. So the scores differ: what is
compared is the difference of two rows, in the paper and here.

<!-- needs: hours -->
```sh
make ablations DATA=data/medical-qa-zh    # runs or resumes all recipes, then writes the report
care ablations --data data/medical-qa-zh --only care,kale --seeds 1
care ablations --data data/medical-qa-zh --report
cp builds/ablations/scores.json builds/ablations/scores.png training/results/ablations/
make docs
```

Each row is a recipe in [training/recipes/ablations](../training/recipes/ablations), run with
`care ablations --data FOLDER --only NAME`.
[tables.toml](../training/recipes/ablations/tables.toml) has the names
and the figures of the paper; [scores.json](../training/results/ablations/scores.json) has ours,
made with the recipes of c96a4c7 ([plot](../training/results/ablations/scores.png)).
[train-a-pair.md](train-a-pair.md#run-the-ablations) describes data and measures.
[training/recipes/paper](../training/recipes/paper) has the same tables with the paper's encoders
and settings, for GPUs; none has been trained. Two stages of `care-0.3b-8b.yaml` ran four steps on
one GPU with random weights ([scale-out.md](scale-out.md#measured-on-one-gpu)).

Scores are in percent: nDCG@10 for Retrieval and MAP@10 for Rerank, with the deviation over seeds;
scores without a deviation have one seed.
The difference of a row is the table's reference minus the row, with its 95 % interval by paired
bootstrap over questions:

| result | the interval |
|---|---|
| reproduces | excludes 0, on the side of the paper |
| contradicts | excludes 0, on the other side |
| equal within ±1 point | includes 0, and lies within ±1 point |
| undecided | is wider; as many questions as named would decide a difference of this size |

"""
_OTHERS = "## Other results of the paper\n\n"


def generated() -> Mapping[Path, str]:
    """Returns the text of each generated file, by its path."""
    reference = DOCS / "reference"
    return {
        DOCS / "openapi.json": _json(openapi_document()),
        reference / "settings.md": _page(_SETTINGS, settings_table()),
        reference / "cli.md": _page(_CLI, commands()),
        reference / "http.md": _page(_HTTP, "\n".join(http(openapi_document()))),
        reference / "python.md": _page(_PYTHON, "\n".join(python())),
        DOCS / "reproduction.md": _page(_REPRODUCTION, reproduction()),
        CLIENT / "client.py": sync_client(),
        SECURITY: _MARKED.sub(
            lambda match: f"{match[1]}\n{settings_table(_LIMIT)}\n\n{match[2]}",
            SECURITY.read_text("utf-8"),
        ),
    }


def sync_client() -> str:
    """Returns the module of the synchronous client."""
    with tempfile.TemporaryDirectory() as folder:
        source = shutil.copy(CLIENT / "async_client.py", folder)
        unasync.unasync_files([source], [unasync.Rule("async_client.py", "client.py", _SYNC_NAMES)])
        text = _CLIENT_NOTE + (Path(folder) / "client.py").read_text("utf-8")
    # Imports under other names have another order, and shorter code fits on fewer lines.
    for command in (["check", "--quiet", "--select=I", "--fix"], ["format"]):
        text = subprocess.run(
            [
                sys.executable,
                "-m",
                "ruff",
                *command,
                f"--stdin-filename={CLIENT / 'client.py'}",
                "-",
            ],
            input=text,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
    return text


def reproduction() -> str:
    """Returns the paper's tables beside the committed scores."""
    tables = experiments.read_tables(ABLATIONS)
    summary = json.loads(SCORES.read_text("utf-8"))
    return f"{experiments.render(tables, summary)}\n{_OTHERS}{experiments.render_others(tables)}"


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
            yield f"Errors: {', '.join(sorted(responses.keys() - {'200'}))}\n"
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


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _page(introduction: str, body: str) -> str:
    return f"{_NOTE}\n{introduction}{body.rstrip()}\n"


if __name__ == "__main__":
    for path, text in generated().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
