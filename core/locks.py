"""Locks of folders between processes; a lock names the process that holds it."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from core.errors import CareError

LOCK = ".lock"

# Pause between attempts to take a lock [s].
_PAUSE = 0.02


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The process that holds a lock, as written in the lock file."""

    pid: int
    host: str  # the name of the container, if the process runs in one
    command: str  # what the process does, as it was given to `exclusive`
    since: str  # when it took the lock, in UTC and ISO 8601


@contextmanager
def exclusive(folder: Path, command: str, name: str = LOCK, *, wait: float = 0.0) -> Iterator[None]:
    """Locks a folder while the block runs; creates the folder if it does not exist.

    The kernel releases the lock when the process ends, even if it is killed (`flock`). Processes
    on other hosts see the lock if the file system supports it, as NFSv4 does.

    Args:
        command: What the block does, shown to processes that cannot take the lock.
        name: Name of the lock file; a folder can have several locks.
        wait: Maximum time to wait for another process [s].

    Raises:
        CareError: `locked`, if another process holds the lock. The fields `pid`, `host`, `command`
            and `since` are those of the holder; without them, the holder is unknown.
    """
    path = folder / name
    deadline = time.monotonic() + wait
    while (descriptor := _take(path)) is None:
        if time.monotonic() >= deadline:
            raise _error(folder, lock_holder(path))
        time.sleep(_PAUSE)
    try:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        me = LockHolder(os.getpid(), socket.gethostname(), command, now)
        _write(descriptor, json.dumps(asdict(me)) + "\n")
        yield
    finally:
        _write(descriptor, "")
        os.close(descriptor)


def lock_holder(path: Path) -> LockHolder | None:
    """Returns who holds the lock of a lock file, or None if nobody does or it is unknown.

    The file is only read: a process on another host is not known to be alive.
    """
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_bytes())
        texts = (str(facts[name]) for name in ("host", "command", "since"))
        holder = LockHolder(int(facts["pid"]), *texts)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if holder.host == socket.gethostname():
        try:
            os.kill(holder.pid, 0)
        except ProcessLookupError:
            return None  # it was killed
        except OSError:
            pass  # the process of another user
    return holder


def _take(path: Path) -> int | None:
    """Returns the descriptor of a locked file, or None if another process holds the lock."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
            # Its last holder may have deleted the file, or the folder.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _write(descriptor: int, content: str) -> None:
    """Replaces the content of a lock file; readers see nothing, or all of it.

    On a full disk the file stays empty: the lock is held all the same, so that a prune can run.
    """
    with suppress(OSError):
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, content.encode(), 0)


def _error(folder: Path, holder: LockHolder | None) -> CareError:
    if holder is None:
        return CareError.at(folder, "is locked by another process: wait until it ends", "locked")
    fields = asdict(holder)
    reason = (
        f"is locked by process {holder.pid} on host {holder.host} ({holder.command}, since "
        f"{holder.since}): wait until it ends"
    )
    return CareError.at(folder, reason, "locked", **fields)
