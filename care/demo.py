"""The demo: indexes the sample corpus, serves it and sends four queries.

The calibration that says when nothing answers is fitted on the sample's own questions, as an index
of 336 documents is too small for that of the pair.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from care.options import IndexOptions
from core.errors import CareError
from core.loopback import open_local
from core.service_process import end_with, start_service
from service.settings import read_settings

_DATA = Path(__file__).with_name("data")
CORPUS = _DATA / "sample/corpus.jsonl"
_ANSWERED = _DATA / "sample/queries.jsonl"
_UNANSWERED = [_DATA / "unanswerable/other-fields.jsonl", _DATA / "unanswerable/near.jsonl"]
_QUERIES = (
    *("血压高的人平时吃饭要注意什么？", "孩子半夜发烧怎么办", "腰疼得直不起身是什么毛病？"),
    "红烧肉怎么做",  # nothing in the sample answers it
)


def demo(say: Callable[[str], None], *, check: bool = False) -> None:
    """Runs the demo until the service or this process is stopped.

    Settings are read from `CARE_*` variables. SIGTERM has the effect of Ctrl-C.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = read_settings()
    port, index, pair = settings.port, settings.index, settings.pair
    with socket.socket() as probe:
        if port and probe.connect_ex(("127.0.0.1", port)) == 0:
            raise CareError(
                f"port {port} is in use: choose another, --port {port + 1} or CARE_PORT={port + 1}",
                code="address_unavailable",
                port=port,
            )
    common = "--index", index, "--pair", pair
    _care("index", str(CORPUS), "--reuse", *common)
    calibrated = IndexOptions().builds / "demo" / "pair.toml"
    calibrated.parent.mkdir(parents=True, exist_ok=True)
    unanswered = [part for path in _UNANSWERED for part in ("--unanswerable", str(path))]
    _care("answerable", "--queries", str(_ANSWERED), *unanswered, "--out", str(calibrated), *common)
    given = {"PORT": str(port), "PAIR": str(calibrated)}
    try:
        service = start_service(settings.indexes, index, given, ends_with_caller=True)
    except CareError as error:
        if error.code == "server_ended":  # after a line that says why
            sys.exit(1)
        raise
    try:
        thresholds = _read(f"{service.url}/index")["answerable_thresholds"]
        answered = [_show(service.url, query, thresholds, say) for query in _QUERIES]
        if check:
            _check(service.url, answered)
            say("")
            say("The demo works: three questions are answered, one is refused, the page is served.")
            return
        _say_what_next(service.url, say)
        if status := service.process.wait():
            raise CareError(
                f"the service stopped with status {status}", code="server_ended", status=status
            )
    except KeyboardInterrupt:
        pass
    finally:
        service.stop()


def _care(*arguments: str) -> None:
    command = [sys.executable, "-m", "care", *arguments]
    if subprocess.run(command, check=False, preexec_fn=partial(end_with, os.getpid())).returncode:
        raise CareError("the index was not built: see the error above", code="build_failed")


def _show(url: str, query: str, thresholds: dict[str, float], say: Callable[[str], None]) -> bool:
    """Prints the hits of a query; returns whether the index answers it."""
    body = json.dumps({"query": query, "top_k": 3}).encode()
    headers = {"Content-Type": "application/json"}
    result = _read(urllib.request.Request(f"{url}/search", body, headers))
    say("")
    say(f"问：{query}    （{result['timings_ms']['total']:.1f} ms）")
    score, threshold = result["answerable"], thresholds.get(result["mode"])
    if score is not None and threshold is not None and score < threshold:
        say(f"  资料中没有能回答这个问题的内容：answerable {score:.3f} < {threshold:.3f}")
        return False
    for hit in result["hits"]:
        department = hit["metadata"].get("department", "")
        text = hit["text"].replace("\n", " ")
        say(f"  {hit['rank']}. {hit['score']:.3f}  [{department}] {hit['title']}")
        say(f"     {text[:72]}{'…' if len(text) > 72 else ''}")
    return bool(result["hits"])


def _say_what_next(url: str, say: Callable[[str], None]) -> None:
    body = json.dumps({"query": "胃疼反酸怎么办", "top_k": 3}, ensure_ascii=False)
    say("")
    say(f"Search page   {url}/")
    say(f"API           {url}/docs")
    say(f"Corpus        {CORPUS}")
    say(f"Try           curl -s {url}/search -H 'Content-Type: application/json' -d '{body}'")
    say("Stop          Ctrl-C")


def _check(url: str, answered: list[bool]) -> None:
    if answered != [True, True, True, False]:
        message = "the demo did not answer its first three questions, or answered the last"
        raise CareError(message, code="demo_failed", answered=answered)
    with open_local(f"{url}/", timeout=10) as page:
        if b"</html>" not in page.read():
            raise CareError("the search page is not complete", code="demo_failed")


def _read(request: urllib.request.Request | str) -> Any:
    with open_local(request, timeout=10) as response:
        return json.load(response)
