from typing import Any, cast

from starlette.types import Scope

from service.http.exchange import Exchange, exchange_of, header


def new_exchange() -> tuple[Exchange, Scope]:
    scope: dict[str, Any] = {"type": "http", "method": "POST", "headers": []}
    return Exchange(cast("Any", None), scope, []), scope


def test_who_waits_is_told_once_that_the_client_has_left() -> None:
    exchange, scope = new_exchange()
    assert exchange_of(scope) is exchange
    told: list[str] = []
    exchange.on_disconnect(lambda: told.append("first"))
    exchange.on_disconnect(None)
    exchange.on_disconnect(lambda: told.append("second"))
    assert told == []
    exchange.disconnect()
    assert told == ["second"]
    exchange.on_disconnect(lambda: told.append("late"))
    assert told == ["second", "late"]


def test_a_body_has_arrived_once_it_can_be_received() -> None:
    exchange, _ = new_exchange()
    assert not exchange.has_arrived()
    exchange.receive_body(b"{")
    assert exchange.has_arrived()


def test_the_first_of_several_equal_headers_counts() -> None:
    scope = {"headers": [(b"a", b"1"), (b"b", b"2"), (b"b", b"3")]}
    assert [header(scope, name) for name in (b"a", b"b", b"c")] == ["1", "2", None]


def test_another_server_has_no_exchange() -> None:
    assert exchange_of({"type": "http"}) is None
