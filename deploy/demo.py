"""`make demo`: indexes the sample corpus, serves it, sends four queries, then waits for Ctrl-C.

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
from functools import partial
from pathlib import Path

from core.cli import run
from core.errors import CareError
from core.loopback import open_local
from core.service_process import end_with, start_service
from core.terminal import shown
from service.settings import read_settings

DATA = Path("data")
CORPUS = DATA / "sample/corpus.jsonl"
ANSWERED = DATA / "sample/queries.jsonl"
UNANSWERED = [DATA / "unanswerable/other-fields.jsonl", DATA / "unanswerable/near.jsonl"]
CALIBRATED = Path("builds/demo/pair.toml")
QUERIES = (
    *("血压高的人平时吃饭要注意什么？", "孩子半夜发烧怎么办", "腰疼得直不起身是什么毛病？"),
    "红烧肉怎么做",  # nothing in the sample answers it
)


def demo() -> None:
    """Runs the demo until the service or this process is stopped.

    Raises:
        CareError: If the port is taken, or the index or the service fails.
    """
    # SIGTERM has the effect of Ctrl-C, so that the service stops too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = read_settings()
    port, index, pair = settings.port, settings.index, settings.pair
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise CareError(
                f"port {port} is in use: choose another, make demo CARE_PORT={port + 1}",
                code="address_unavailable",
                port=port,
            )
    common = "--index", index, "--pair", pair
    _care("index", str(CORPUS), "--reuse", *common)
    CALIBRATED.parent.mkdir(parents=True, exist_ok=True)
    unanswered = [part for path in UNANSWERED for part in ("--unanswerable", str(path))]
    _care("answerable", "--queries", str(ANSWERED), *unanswered, "--out", str(CALIBRATED), *common)
    given = {"PORT": str(port), "PAIR": str(CALIBRATED)}
    try:
        service = start_service(settings.indexes, index, given, ends_with_caller=True)
    except CareError as error:
        if error.code == "server_ended":  # after a line that says why
            sys.exit(1)
        raise
    try:
        with open_local(f"{service.url}/index", timeout=10) as response:
            thresholds = json.load(response)["answerable_thresholds"]
        for query in QUERIES:
            _search(service.url, query, thresholds)
        body = json.dumps({"query": "胃疼反酸怎么办", "top_k": 3}, ensure_ascii=False)
        headers = "-H 'Content-Type: application/json'"
        print(f"\nSearch page   {service.url}/")
        print(f"API           {service.url}/docs")
        print(f"Try           curl -s {service.url}/search {headers} -d '{body}'")
        print("Stop          Ctrl-C", flush=True)
        if status := service.process.wait():
            raise CareError(
                f"the service stopped with status {status}", code="server_ended", status=status
            )
    finally:
        service.stop()


def _care(*arguments: str) -> None:
    command = [sys.executable, "-m", "care", *arguments]
    if subprocess.run(command, check=False, preexec_fn=partial(end_with, os.getpid())).returncode:
        raise CareError("the index was not built: see the error above", code="build_failed")


def _search(url: str, query: str, thresholds: dict[str, float]) -> None:
    body = json.dumps({"query": query, "top_k": 3}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/search", body, headers)
    with open_local(request, timeout=10) as response:
        result = json.load(response)
    print(f"\n问：{query}    （{result['timings_ms']['total']:.1f} ms）")
    score, threshold = result["answerable"], thresholds.get(result["mode"])
    if score is not None and threshold is not None and score < threshold:
        print(f"  资料中没有能回答这个问题的内容：answerable {score:.3f} < {threshold:.3f}")
        return
    for hit in result["hits"]:
        department = hit["metadata"].get("department", "")
        text = hit["text"].replace("\n", " ")
        print(shown(f"  {hit['rank']}. {hit['score']:.3f}  [{department}] {hit['title']}"))
        print(shown(f"     {text[:72]}{'…' if len(text) > 72 else ''}"))


if __name__ == "__main__":
    status = run(demo, interrupted="")
    sys.exit(0 if status == 130 else status)
