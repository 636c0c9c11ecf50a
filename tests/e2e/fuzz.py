"""Bodies of requests that are nearly right, wrong, or as long as the limits allow; their check."""

import json
from typing import Any

from hypothesis import strategies as st

from service.settings import Settings
from tests.e2e.attacks import BODY_BYTES, FIELDS, VALUES, Attack
from tests.e2e.victim import Finding, Victim

# The goal is 50 ms of processor time on an idle machine; clocks and caches of others vary.
_CALLBACK_MS = 150.0
_ATTEMPTS = 3
# Bodies that are received, answers that are made, and bytes that clients have not taken
# (docs/serve-and-operate.md).
_GROWTH_BYTES = (256 << 20) + sum(
    Settings.model_fields[name].default for name in ("max_answer_bytes", "max_unsent_bytes")
)

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

    def repeated(value: str, count: int) -> str:
        return f"[{f'{value},' * min(count, BODY_BYTES // (len(value) + 1))}{value}]"

    return st.builds(repeated, values, _LONG)


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


def _written(
    route: str, names: st.SearchStrategy[str], values: st.SearchStrategy[str]
) -> st.SearchStrategy[bytes]:
    """Valid objects of a route in which some fields have other values."""
    valid = {json.dumps(name): json.dumps(value) for name, value in _VALID[route].items()}
    others = st.dictionaries(names | st.text(max_size=80).map(json.dumps), values, max_size=3)

    def written(fields: dict[str, str]) -> bytes:
        pairs = (f"{name}:{value}" for name, value in (valid | fields).items())
        return ("{" + ",".join(pairs) + "}").encode()

    return others.map(written)


def _mutated(route: str) -> st.SearchStrategy[bytes]:
    """Valid bodies in which pieces are deleted, repeated or replaced by other bytes."""
    valid = json.dumps(_VALID[route], ensure_ascii=False).encode()
    place = st.integers(0, len(valid))
    times = st.sampled_from((0, 1, 2, 1 << 10, 1 << 16))
    change = st.tuples(place, st.integers(0, 40), st.none() | st.binary(max_size=8), times)

    def mutated(changes: list[tuple[int, int, bytes | None, int]]) -> bytes:
        body = valid
        for start, length, other, count in changes:
            piece = body[start : start + length] if other is None else other
            body = body[:start] + piece * count + body[start + length :]
        return body

    return st.lists(change, min_size=1, max_size=4).map(mutated)


def _bodies(route: str) -> st.SearchStrategy[tuple[str, bytes]]:
    names = st.sampled_from(_NAMES[route]).map(json.dumps)
    values = _values(names)
    body = st.one_of(_written(route, names, values), _mutated(route), values.map(str.encode))
    return body.map(lambda body: (route, body[:BODY_BYTES]))


# A route, and a body of at most 4 MiB.
BODIES = st.one_of(*map(_bodies, _NAMES))


def check(service: Victim, attack: Attack, hold: float) -> Finding:
    """Expects that an attack neither stalls nor breaks the service, at the best of three times."""
    for _ in range(_ATTEMPTS):
        found = service.suffer(attack, hold)
        assert found.probes_failed == 0, found
        assert found.search == "200", found
        assert not {"500", "501", "502"} & found.outcomes.keys(), found
        assert found.rss_bytes["peak"] - found.rss_bytes["before"] <= _GROWTH_BYTES, found
        if found.callback_ms <= _CALLBACK_MS:
            return found
    raise AssertionError(found)
