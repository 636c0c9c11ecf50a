"""`make demo`: indexes the sample corpus, serves it, sends three queries, then waits for Ctrl-C."""

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
from service.settings import read_settings

CORPUS = Path("data/sample/corpus.jsonl")
QUERIES = ("血压高的人平时吃饭要注意什么？", "孩子半夜发烧怎么办", "腰疼得直不起身是什么毛病？")


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
    build = [sys.executable, "-m", "care", "index", str(CORPUS), "--reuse"]
    build += ["--index", index, "--pair", pair]
    with_demo = partial(end_with, os.getpid())
    if subprocess.run(build, check=False, preexec_fn=with_demo).returncode:
        raise CareError("the index was not built: see the error above", code="build_failed")
    given = {"PORT": str(port), "PAIR": pair}
    try:
        service = start_service(settings.indexes, index, given, ends_with_caller=True)
    except CareError as error:
        if error.code == "server_ended":  # after a line that says why
            sys.exit(1)
        raise
    try:
        for query in QUERIES:
            _search(service.url, query)
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


def _search(url: str, query: str) -> None:
    body = json.dumps({"query": query, "top_k": 3}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/search", body, headers)
    with open_local(request, timeout=10) as response:
        result = json.load(response)
    print(f"\n问：{query}    （{result['timings_ms']['total']:.1f} ms）")
    for hit in result["hits"]:
        department = hit["metadata"].get("department", "")
        text = hit["text"].replace("\n", " ")
        print(f"  {hit['rank']}. {hit['score']:.3f}  [{department}] {hit['title']}")
        print(f"     {text[:72]}{'…' if len(text) > 72 else ''}")


if __name__ == "__main__":
    status = run(demo, interrupted="")
    sys.exit(0 if status == 130 else status)
