"""Copies of an index for measurements, and connections to the service that serves them."""

import json
import shutil
import time
from collections.abc import Sequence
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from core.versions import IndexFolder, read_manifest, write_manifest


class Connection:
    """A keep-alive connection to a service."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._connection = HTTPConnection(address.hostname or "", address.port, timeout=120)

    def ask(self, method: str, path: str, body: Any) -> tuple[float, dict[str, Any]]:
        """Returns the time of a request [ms] and its answer; AssertionError if it fails."""
        started = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        self._connection.request(method, path, json.dumps(body), headers)
        response = self._connection.getresponse()
        content = response.read()
        assert response.status == 200, content
        return (time.perf_counter() - started) * 1000, json.loads(content)


def copy_index(base: IndexFolder, name: str) -> None:
    """Makes an index of another name that has a copy of the active version, unless it exists."""
    copy, version = IndexFolder(base.root, name), base.active()
    if copy.path.exists():
        return
    shutil.copytree(base.version(version), copy.version(version))
    manifest = read_manifest(base.version(version)).model_copy(update={"name": name})
    write_manifest(copy.version(version), manifest)
    copy.set_active(version)


def quantiles(times: Sequence[float]) -> str:
    """Describes times [ms]."""
    p50, p99 = np.percentile(times, [50, 99])
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"
