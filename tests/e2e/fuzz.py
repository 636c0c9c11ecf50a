"""Bodies of requests that are nearly right, wrong, or as long as the limits allow; their check."""

import json
from typing import Any

from hypothesis import strategies as st

from loadtest.bench.attacks import BODY_BYTES, FIELDS, VALUES, Attack
from loadtest.bench.hostile import Finding, Victim

# The goal is 50 ms of processor time on an idle machine; clocks and caches of others vary.
_CALLBACK_MS = 150.0
_ATTEMPTS = 3

ROUTES = ("/search", "/search/batch", "/v1/embeddings")

_NAMES = {
    "/search": ("query", "top_k", "filter", "min_score", "collapse", "include"),
    "/search/batch": ("queries",),
    "/v1/embeddings": ("input", "input_type", "model", "dimensions", "encoding_format", "user"),
}
_VALID: dict[str, Any] = {
    "/search": {
        "query": "高血压患者饮食上要注意什么？",
        "top_k": 1000,
        "filter": {field: list(VALUES[:3]) for field in FIELDS[:3]},
        "min_score": 0.1,
        "collapse": True,
        "include": ["text"],
    },
    "/search/batch": {"queries": [{"query": "咳嗽", "top_k": 20}, {"query": "发热"}]},
    "/v1/embeddings": {"input": ["咳嗽", "发热"], "dimensions": 8, "encoding_format": "base64"},
}
_LONG = st.integers(0, 22).map(lambda exponent: 1 << exponent)

_SCALARS = st.one_of(
    st.sampled_from(
        ("null", "true", "-0", "1e400", "-1e-400", "NaN", "0.1", '""', '"\\ud800"', '"text"', '"a"')
    ),
    st.integers(0, 10**30).map(str),
    st.text(max_size=20).map(json.dumps),
    _LONG.map(lambda count: "9" * count),
    _LONG.map(lambda count: '"' + "a" * count + '"'),
    _LONG.map(lambda count: '"' + "\\u9ad8" * (count // 6) + '"'),
)


def _repeated(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Lists of one value, as long as the limit allows."""
    return st.builds(
        lambda value, count: f"[{','.join([value] * min(count, BODY_BYTES // (len(value) + 1)))}]",
        values,
        _LONG,
    )


def _nested(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    def nested(value: str, brackets: tuple[str, str], depth: int) -> str:
        return brackets[0] * depth + value + brackets[1] * depth

    brackets = st.sampled_from((("[", "]"), ('{"query":', "}")))
    return st.builds(nested, values, brackets, _LONG.map(lambda depth: depth >> 3))


def _objects(
    names: st.SearchStrategy[str], values: st.SearchStrategy[str]
) -> st.SearchStrategy[str]:
    pairs = st.lists(st.tuples(names, values), max_size=8)
    return pairs.map(lambda found: "{" + ",".join(f"{n}:{v}" for n, v in found) + "}")


def _numbered(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Objects of many different names."""

    def numbered(value: str, count: int) -> str:
        count = min(count, BODY_BYTES // (len(value) + 12))
        return "{" + ",".join(f'"f{i}":{value}' for i in range(count)) + "}"

    return st.builds(numbered, values, _LONG)


def _values(names: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    def larger(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            _repeated(values), _nested(values), _objects(names, values), _numbered(values)
        )

    return st.recursive(_SCALARS, larger, max_leaves=6)


@st.composite
def _written(draw: st.DrawFn, route: str) -> bytes:
    """A valid object of a route in which some fields have other values."""
    known = st.sampled_from(_NAMES[route]).map(json.dumps)
    names = known | st.text(max_size=80).map(json.dumps)
    fields = {json.dumps(name): json.dumps(value) for name, value in _VALID[route].items()}
    fields |= draw(st.dictionaries(names, _values(known), max_size=3))
    return ("{" + ",".join(f"{name}:{value}" for name, value in fields.items()) + "}").encode()


@st.composite
def _mutated(draw: st.DrawFn, route: str) -> bytes:
    """A valid body in which pieces are deleted, repeated or replaced by other bytes."""
    body = json.dumps(_VALID[route], ensure_ascii=False).encode()
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(body)))
        end = draw(st.integers(start, min(len(body), start + 40)))
        other = draw(st.binary(max_size=8)) if draw(st.booleans()) else body[start:end]
        body = (
            body[:start] + other * draw(st.sampled_from((0, 1, 2, 1 << 10, 1 << 16))) + body[end:]
        )
        body = body[:BODY_BYTES]
    return body


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route and a body of at most 4 MiB."""
    route = draw(st.sampled_from(ROUTES))
    anything = _values(st.sampled_from(_NAMES[route]).map(json.dumps)).map(str.encode)
    body = draw(st.one_of(_written(route), _mutated(route), anything))
    return route, body[:BODY_BYTES]


def check(service: Victim, attack: Attack, hold: float) -> Finding:
    """Expects that an attack neither stalls nor breaks the service, at the best of three times."""
    for _ in range(_ATTEMPTS):
        found = service.suffer(attack, hold)
        assert found.probes_failed == 0, found
        assert not {"500", "501", "502"} & found.outcomes.keys(), found
        if found.callback_ms <= _CALLBACK_MS:
            return found
    raise AssertionError(found)
