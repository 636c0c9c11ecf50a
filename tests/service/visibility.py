"""Random callers who search an index, and what each of them may see, by an oracle in Python."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi.testclient import TestClient
from httpx2 import Response

from core.aliases import read_aliases, set_alias
from core.documents import FILE_NAME, DocumentReader
from core.versions import IndexFolder
from service.access.api_keys import new_key
from tests.core.test_filters import naive_rows

# Each text, title, id and one metadata value of a document have its marker.
_MARKER = re.compile(r"m\dx\d{3}")
_DEPARTMENTS = ("内科", "外科", "儿科")
_SUBJECTS = ("高血压", "发热", "骨折", "咳嗽", "失眠")
# Where requests go, and which index they then mean; what the alias means changes.
_PREFIXES = {"": "test", "/indexes/test": "test", "/indexes/other": "other", "/indexes/live": ""}
# Requests that are sent at once.
_TOGETHER = 3

Json = dict[str, Any]


def records(version: int, count: int = 40) -> list[Json]:
    """Documents of a version; some have fields that others lack."""
    made = []
    for i in range(count):
        marker, subject = f"m{version}x{i:03d}", _SUBJECTS[i % len(_SUBJECTS)]
        metadata: Json = {"department": _DEPARTMENTS[i % 3], "year": 2015 + i % 8, "code": marker}
        if i % 4 == 0:
            metadata["ward"] = [f"病区{i % 5}", i % 7]
        if i % 9 == version:
            metadata[f"only-{version}"] = True
        sentences = "".join(f"{marker}的{subject}护理要点之{n}。" for n in range(1 + i % 6))
        made.append(
            {"_id": marker, "title": f"{subject}{marker}", "text": sentences, "metadata": metadata}
        )
    return made


@dataclass(frozen=True)
class Key:
    """A key with its grants as they are written."""

    secret: str
    entry: str
    grants: Sequence[Json]

    def filter(self, index: str) -> Mapping[str, Any] | None:
        """The filter of its searches in an index, {} for all documents; None if it may not."""
        for grant in self.grants:
            if fnmatchcase(index, grant["indexes"]):
                return grant.get("filter", {})
        return None


@dataclass
class Report:
    """What has been asked, and what was wrong with the answers."""

    requests: int = 0
    hits: int = 0
    outside: list[str] = field(default_factory=list)  # documents that a caller must not see
    wrong: list[str] = field(default_factory=list)  # other differences from the oracle


class Rows:
    """The rows of a version, as the oracle sees them."""

    def __init__(self, folder: Path) -> None:
        documents = list(DocumentReader(folder / FILE_NAME))
        self.ids = [document.id for document in documents]
        self.parents = [document.parent or document.id for document in documents]
        self.metadata = [document.metadata for document in documents]

    def seen(self, *filters: Mapping[str, Any]) -> list[int]:
        """The rows that match all filters: those of a field that no document has match nothing."""
        grant, *_ = filters
        if any(not any(name in own for own in self.metadata) for name in grant):
            return []
        return sorted(set.intersection(*(set(naive_rows(self.metadata, one)) for one in filters)))


class Attack:
    """Sends random requests of random callers to a service, and compares the answers.

    `versions` are the folders of versions of the default index, which become active in turn;
    `other` is that of the only version of another index. An alias means one of the two in turn.
    """

    def __init__(self, seed: int, versions: Sequence[Path], other: Path) -> None:
        self._random = random.Random(seed)
        self._versions = {folder.name: Rows(folder) for folder in (*versions, other)}
        self._names = [folder.name for folder in versions]
        self._indexes = other.parents[1]
        self._current = versions[0].parent / "CURRENT"
        set_alias(self._indexes, "live", "test")
        self._admin = _key("ops", [{"indexes": "*", "role": "admin"}])
        self.keys = [_key(f"k{i}", self._grants()) for i in range(8)]
        self.report = Report()

    @property
    def key_file(self) -> str:
        return "\n".join(key.entry for key in (self._admin, *self.keys))

    def run(self, client: TestClient, steps: int, *, until_outside: bool = False) -> Report:
        """Sends `steps` times some requests at once, or until a caller has seen too much."""
        with ThreadPoolExecutor(_TOGETHER) as pool:
            for _ in range(steps):
                if until_outside and self.report.outside:
                    break
                if self._random.random() < 0.03:
                    self._reload(client)
                if self._random.random() < 0.1:
                    set_alias(self._indexes, "live", self._random.choice(["test", "other"]))
                prefix = self._random.choice(list(_PREFIXES))
                method, path, body = self._request()
                address = prefix if prefix and path == "/index" else prefix + path
                callers = self._random.sample(self.keys, _TOGETHER)
                sent = [pool.submit(_send, client, key, method, address, body) for key in callers]
                for key, one in zip(callers, sent, strict=True):
                    self._check(key, prefix, path, body, one.result(), client)
        return self.report

    def _grants(self) -> list[Json]:
        grants = []
        for _ in range(self._random.randint(1, 3)):
            grant: Json = {
                "indexes": self._random.choice(["test", "test", "t*", "*", "other", "other-*"]),
                "role": "search",
            }
            if self._random.random() < 0.8:
                grant["filter"] = self._filter(least=1)
            grants.append(grant)
        return grants

    def _filter(self, least: int = 0) -> Json:
        choose = self._random.choice
        conditions: list[tuple[str, Any]] = [
            ("department", choose(_DEPARTMENTS)),
            ("department", {"not": [choose(_DEPARTMENTS)]}),
            ("year", {"gte": self._random.randint(2014, 2022)}),
            ("year", [2015, 2016, 2017]),
            ("ward", f"病区{self._random.randint(0, 5)}"),
            ("ward", {"not": [0]}),
            ("only-1", True),
            ("only-2", {"not": True}),
            ("code", [f"m{v}x{self._random.randint(0, 41):03d}" for v in (1, 2, 3)]),
        ]
        size = self._random.randint(least, 2)
        return dict(self._random.sample(conditions, size))

    def _request(self) -> tuple[str, str, Any]:
        kind = self._random.random()
        if kind < 0.5:
            return "POST", "/search", self._query()
        if kind < 0.7:
            queries = [self._query() for _ in range(self._random.randint(1, 4))]
            return "POST", "/search/batch", {"queries": queries}
        if kind < 0.95:
            rows = self._random.choice(list(self._versions.values()))
            ids = [self._random.choice(rows.ids), self._random.choice(rows.parents), "missing"]
            return "GET", f"/documents/{quote(self._random.choice(ids), safe='')}", None
        return "GET", "/index", None

    def _query(self) -> Json:
        choose = self._random.choice
        query: Json = {
            # Few queries, so that callers share them; some are of one document.
            "query": choose([*_SUBJECTS[:2], f"m{choose('123')}x{self._random.randint(0, 3):03d}"]),
            "top_k": choose([1, 3, 50, 500]),
            "filter": choose([{}, {}, self._filter()]),
            "mode": choose(["dense", "lexical", "hybrid", None]),
        }
        extras: Json = {
            "explain": True,
            "evidence": True,
            "collapse": True,
            "min_score": 0.1,
            "limit_per": {"field": choose(["department", "ward", "_document"]), "hits": 1},
            "include": ["text"],
        }
        return query | {name: extras[name] for name in extras if self._random.random() < 0.15}

    def _reload(self, client: TestClient) -> None:
        self._current.write_text(self._random.choice(self._names))
        headers = {"Authorization": f"Bearer {self._admin.secret}"}
        assert client.post("/index/reload", headers=headers).status_code == 200

    def _check(
        self, key: Key, prefix: str, path: str, body: Any, response: Response, client: Any
    ) -> None:
        self.report.requests += 1
        index = _PREFIXES[prefix] or read_aliases(self._indexes)["live"]
        active = IndexFolder(self._indexes, index).active()
        bounds, rows = key.filter(index), self._versions[active]
        if bounds is None:
            refused = 404 if prefix else 403
            self._expect(response.status_code == refused, f"{refused}", path, response)
            if prefix:
                missing = _send(client, key, "GET", "/indexes/no-such-index", None)
                self._expect(_same(missing, response), "as missing", path, response)
            return
        visible = rows.seen(bounds)
        markers = {rows.parents[row] for row in visible}
        for marker in sorted(set(_MARKER.findall(response.text)) - markers):
            # The error of a filter has the names of its fields, never a value.
            self.report.outside.append(f"{marker}: {path} {body} within {bounds}")
        answer = response.json()
        if response.status_code == 422:
            self._expect(not bounds, "no error of unknown fields", path, response)
        elif path.startswith("/documents"):
            self._check_document(key, prefix, path, response, rows, visible, client)
        elif path == "/index":
            self._check_index(answer, rows, visible)
        else:
            self._expect(response.status_code == 200, "200", path, response)
            queries = body.get("queries", [body])
            answers = answer["results"] if "queries" in body else [answer]
            for query, each in zip(queries, answers, strict=True):
                self._check_hits(query, each["hits"], rows, bounds)

    def _check_hits(self, query: Json, hits: list[Json], rows: Rows, bounds: Any) -> None:
        matching = rows.seen(bounds, query["filter"])
        ids = {rows.ids[row] for row in matching}
        self.report.hits += len(hits)
        for hit in hits:
            if hit["id"] not in ids:
                self.report.outside.append(f"{hit['id']}: {query} within {bounds}")
        limited = query.keys() & {"collapse", "min_score", "limit_per"}
        if query["mode"] != "dense" or limited:
            return
        if len(hits) != min(query["top_k"], len(matching)):
            self.report.wrong.append(f"{len(hits)} of {len(matching)}: {query} within {bounds}")

    def _check_document(
        self,
        key: Key,
        prefix: str,
        path: str,
        response: Response,
        rows: Rows,
        visible: list[int],
        client: TestClient,
    ) -> None:
        id_ = path.removeprefix("/documents/").replace("%23", "#")
        found = any(id_ in (rows.ids[row], rows.parents[row]) for row in visible)
        self._expect((response.status_code == 200) == found, f"found {found}", path, response)
        if not found:
            missing = _send(client, key, "GET", f"{prefix}/documents/no-such-id", None)
            self._expect(_same(missing, response), "as missing", path, response)

    def _check_index(self, answer: Json, rows: Rows, visible: list[int]) -> None:
        values: dict[str, set[str]] = {}
        for row in visible:
            for name, value in rows.metadata[row].items():
                own = value if isinstance(value, list) else [value]
                values.setdefault(name, set()).update(map(json.dumps, own))
        found = {name: set(map(json.dumps, own)) for name, own in answer["filters"].items()}
        numbers = {
            name: dict(zip(map(json.dumps, own), answer["filter_counts"][name], strict=True))
            for name, own in answer["filters"].items()
        }
        for row in visible:
            for name, value in rows.metadata[row].items():
                for own in set(map(json.dumps, value if isinstance(value, list) else [value])):
                    numbers[name][own] -= 1
        if any(left for of_field in numbers.values() for left in of_field.values()):
            self.report.wrong.append(f"/index: {numbers} are left of the counts")
        documents = len({rows.parents[row] for row in visible})
        expected = [values, len(values), len(visible), documents]
        given = [found, *(answer[n] for n in ("filter_field_count", "count", "documents"))]
        if given != expected:
            self.report.wrong.append(f"/index: {given} is not {expected}")

    def _expect(self, holds: bool, what: str, path: str, response: Response) -> None:
        if not holds:
            self.report.wrong.append(f"{path}: {response.status_code} {response.text}, not {what}")


def _key(name: str, grants: Sequence[Json]) -> Key:
    return Key(*new_key(name, "search", grants), grants)


def _send(client: TestClient, key: Key, method: str, path: str, body: Any) -> Response:
    headers = {"Authorization": f"Bearer {key.secret}"}
    return client.request(method, path, json=body, headers=headers)


def _same(one: Response, other: Response) -> bool:
    """Whether two answers differ in their request ids only."""
    bodies = [{**each.json(), "request_id": ""} for each in (one, other)]
    headers = [{**each.headers, "x-request-id": ""} for each in (one, other)]
    return (
        one.status_code == other.status_code
        and bodies[0] == bodies[1]
        and (dict(headers[0].items()) == headers[1])
    )
