"""`make demo`: index the sample corpus, serve it, ask it three questions, stay up."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

from core.cli import run
from core.errors import CareError
from core.service_process import start_service

CORPUS = Path("data/sample/corpus.jsonl")
QUESTIONS = ("血压高的人平时吃饭要注意什么？", "孩子半夜发烧怎么办", "腰疼得直不起身是什么毛病？")


def demo() -> None:
    """Runs the demo until the service ends, or this process is told to.

    Raises:
        CareError: If the port is taken, or the index or the service fails.
    """
    # Ends like Ctrl-C, so that the service ends too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    port, index, pair = (os.environ[f"CARE_{name}"] for name in ("PORT", "INDEX", "PAIR"))
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", int(port))) == 0:
            raise CareError(
                f"port {port} is taken: choose another, make demo CARE_PORT={int(port) + 1}",
                code="address_unavailable",
                port=port,
            )
    build = [sys.executable, "-m", "indexer", "build", "--reuse", "--corpus", str(CORPUS)]
    if subprocess.run([*build, "--index", index, "--pair", pair], check=False).returncode:
        raise CareError("the index was not built: the reason is above", code="build_failed")
    service = start_service("indexes", index, {"PORT": port, "PAIR": pair})
    try:
        for question in QUESTIONS:
            _ask(service.url, question)
        body = json.dumps({"query": "胃疼反酸怎么办", "top_k": 3}, ensure_ascii=False)
        headers = "-H 'Content-Type: application/json'"
        print(f"\nSearch page   {service.url}/")
        print(f"API           {service.url}/docs")
        print(f"Try           curl -s {service.url}/search {headers} -d '{body}'")
        print("Stop          Ctrl-C", flush=True)
        if status := service.process.wait():
            raise CareError("the service has ended", code="server_ended", status=status)
    finally:
        service.stop()


def _ask(url: str, question: str) -> None:
    body = json.dumps({"query": question, "top_k": 3}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/search", body, headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        answer = json.load(response)
    print(f"\n问：{question}    （{answer['timings_ms']['total']:.1f} ms）")
    for hit in answer["hits"]:
        department = hit["metadata"].get("department", "")
        text = hit["text"].replace("\n", " ")
        print(f"  {hit['rank']}. {hit['score']:.3f}  [{department}] {hit['title']}")
        print(f"     {text[:72]}{'…' if len(text) > 72 else ''}")


if __name__ == "__main__":
    status = run(demo, interrupted="")
    sys.exit(0 if status == 130 else status)
