"""`make demo`: index the sample corpus, serve it, ask it three questions, stay up."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

CORPUS = Path("data/sample/corpus.jsonl")
QUESTIONS = ("血压高的人平时吃饭要注意什么？", "孩子半夜发烧怎么办", "腰疼得直不起身是什么毛病？")
READY_WITHIN = 60.0


def main() -> int:
    """Runs the demo; returns the exit status."""
    port = int(os.environ["CARE_PORT"])
    url = f"http://127.0.0.1:{port}"
    if _taken(port):
        print(f"error: port {port} is taken; choose another: make demo CARE_PORT={port + 1}")
        return 1
    build = subprocess.run(
        [
            *(sys.executable, "-m", "indexer", "build", "--reuse", "--corpus", str(CORPUS)),
            *("--index", os.environ["CARE_INDEX"], "--pair", os.environ["CARE_PAIR"]),
        ],
        check=False,
    )
    if build.returncode:
        return build.returncode
    service = subprocess.Popen(
        [sys.executable, "-m", "service"], env=os.environ | {"CARE_LOG_LEVEL": "warning"}
    )
    try:
        if not _wait(url, service):
            return 1
        for question in QUESTIONS:
            _ask(url, question)
        _say_how_to_go_on(url)
        return service.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        service.terminate()
        service.wait()


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait(url: str, service: "subprocess.Popen[bytes]") -> bool:
    end = time.monotonic() + READY_WITHIN
    while service.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    if service.poll() is None:
        print(f"error: the service is not ready after {READY_WITHIN:.0f} s")
    return False


def _ask(url: str, question: str) -> None:
    request = urllib.request.Request(
        f"{url}/search",
        data=json.dumps({"query": question, "top_k": 3}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        answer = json.load(response)
    print(f"\n问：{question}    （{answer['timings_ms']['total']:.1f} ms）")
    for hit in answer["hits"]:
        department = hit["metadata"].get("department", "")
        text = hit["text"].replace("\n", " ")
        print(f"  {hit['rank']}. {hit['score']:.3f}  [{department}] {hit['title']}")
        print(f"     {text[:72]}{'…' if len(text) > 72 else ''}")


def _say_how_to_go_on(url: str) -> None:
    body = json.dumps({"query": "胃疼反酸怎么办", "top_k": 3}, ensure_ascii=False)
    print(f"\nSearch page   {url}/")
    print(f"API           {url}/docs")
    print(f"Try           curl -s {url}/search -H 'Content-Type: application/json' -d '{body}'")
    print("Stop          Ctrl-C", flush=True)


if __name__ == "__main__":
    sys.exit(main())
