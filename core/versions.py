"""Index versions on disk: immutable folders, and a file with the id of the active version.

<root>/<name>/CURRENT                    id of the active version
<root>/<name>/<version>/manifest.json    folders without it are not versions
<root>/<name>/<version>/manifest.sha256  its checksum, as sha256sum writes it
<root>/<name>/<version>/segment.json     facts of the segment that a write has added, if it has; or
<root>/<name>/<version>/segment.pack     these and its files as one, if it is small

A build writes all documents as one segment, into the folder of its version. A write adds one with
its new documents, in the folder of the new version, whose manifest names all segments; each lies in
the folder of the version that wrote it. The folder of a deleted version stays, without a manifest,
while other versions need its segment: a manifest of a build is then `segment.json`.

A version is a folder of regular files: nothing in it, nor the folder itself, may be a symbolic
link. The folders above it and `CURRENT` may be links.

Versions are ordered by their numbers, which they get at publication. Clocks of machines do not
matter.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from core.errors import CareError, IndexVersionError
from core.files import atomic, read_small, sync, write_text
from core.manifest import (
    NAME,
    OF_VERSION,
    OLDEST_SCHEMA_VERSION,
    SCHEMA_VERSION,
    SEGMENT_FILE,
    IndexManifest,
    SegmentEntry,
    SegmentFacts,
)
from core.packs import PACK_FILE, read_facts
from core.records import parse_json

MANIFEST = "manifest.json"
CHECKSUM = "manifest.sha256"

CURRENT = "CURRENT"
# More than `CURRENT` and a checksum take [bytes].
_LINE_BYTES = 1 << 12
# Errors of a full disk, of too many open files, of too little memory.
OF_THE_MACHINE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}
_T = TypeVar("_T")
_NAME = re.compile(NAME)


def list_indexes(root: Path) -> list[str]:
    """Returns the names of the indexes in a folder that have an active version."""
    return sorted(path.parent.name for path in root.glob(f"[!.]*/{CURRENT}"))


@dataclass(frozen=True, slots=True)
class IndexFolder:
    """The folder `root/name` of an index: its versions, and which of them is active.

    Raises:
        IndexVersionError: If the name has characters that are not safe in paths and shells.
    """

    root: Path
    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            message = (
                f"'{self.name}' is not a valid index name: use up to 64 letters, digits, '.', '_' "
                "and '-', starting with a letter or digit"
            )
            raise IndexVersionError(message, code="bad_index_name", name=self.name)

    @property
    def path(self) -> Path:
        return self.root / self.name

    def version(self, version: str) -> Path:
        return self.path / version

    def active(self) -> str:
        """Returns the id of the active version; IndexVersionError if there is none."""
        path = self.path / CURRENT
        try:
            version = read_small(path, _LINE_BYTES).decode(errors="replace").strip()
        except FileNotFoundError as error:
            message = (
                f"index '{self.name}' has no active version in {self.root}: build it with "
                f"care index CORPUS --index {self.name}"
            )
            raise IndexVersionError(message, code="no_active_version", index=self.name) from error
        except OSError as error:
            reason = f"cannot be read ({error.strerror}): activate a version"
            raise IndexVersionError.at(path, reason, "bad_current") from error
        if not _NAME.fullmatch(version):
            raise IndexVersionError.at(
                path, "does not contain a version id: activate a version", "bad_current"
            )
        return version

    def versions(self) -> list[str]:
        """Returns the ids of all complete versions, in the order of their publication."""
        return list(self.numbers())

    def manifests(self) -> list[IndexManifest]:
        """Returns the manifests of all complete versions, in the order of their publication."""
        manifests = []
        for version in self.versions():
            try:
                manifests.append(read_manifest(self.version(version)))
            except IndexVersionError:
                if self.version(version).exists():  # otherwise it was deleted in the meantime
                    raise
        return manifests

    def numbers(self) -> dict[str, int]:
        """Returns the number of each complete version, in the order of their publication.

        Those whose manifests are damaged have the number 0.
        """
        numbers: dict[str, int] = {}
        for path in self.path.glob(f"[!.]*/{MANIFEST}"):
            with suppress(FileNotFoundError):  # it is being deleted
                numbers[path.parent.name] = _number(path.parent)
        return dict(sorted(numbers.items(), key=lambda item: (item[1], item[0])))

    def last_number(self, known: dict[str, int]) -> int:
        """Returns the largest number of a version, without reading again what is `known`.

        Numbers of folders by their names are added to `known`; those that are gone are removed.
        """
        with os.scandir(self.path) as entries:
            names = {one.name for one in entries if one.name[0] != "." and one.is_dir()}
        for name in names - known.keys():
            with suppress(FileNotFoundError):  # the folder of a segment
                known[name] = _number(self.path / name)
        for name in known.keys() - names:
            del known[name]
        return max(known.values(), default=0)

    def check(self, version: str) -> None:
        """Raises IndexVersionError if the index has no complete version of this id."""
        if not (_NAME.fullmatch(version) and (self.version(version) / MANIFEST).exists()):
            versions = self.versions()
            message = (
                f"index '{self.name}' has no version '{version}' in {self.root}; its versions are: "
                f"{', '.join(versions) or 'none'}"
            )
            raise IndexVersionError(message, code="unknown_version", version=version)

    def set_active(self, version: str) -> None:
        """Activates a version, atomically; see `activating`."""
        with self.activating(version):
            pass

    @contextmanager
    def activating(self, version: str) -> Iterator[None]:
        """Activates a version, atomically, when the block succeeds.

        `CURRENT` is written before the block runs, so that a full disk fails before the block.

        Raises:
            IndexVersionError: If the version does not exist.
        """
        self.check(version)
        with atomic(self.path / CURRENT, flushed=True) as temporary:
            temporary.write_text(version + "\n", encoding="utf-8")
            sync(temporary)
            yield


def _number(folder: Path) -> int:
    """Returns the number of a version of any schema; 0 if its manifest is damaged."""
    try:
        number = parse_json(_read(folder, MANIFEST))["number"]
    except FileNotFoundError:
        raise
    except (OSError, CareError, ValueError, TypeError, KeyError):
        return 0
    return number if isinstance(number, int) else 0


def with_version(active: Callable[[], str], use: Callable[[str], _T]) -> _T:
    """Returns what `use` returns for the id of the active version.

    If `use` fails and another version is active by then, it is called again: the first version may
    have been deleted in the meantime. Programs that only read need no lock for this reason. If the
    same version is still active, the error of `use` is raised.
    """
    version = active()
    while True:
        try:
            return use(version)
        except (CareError, OSError):
            if (now := active()) == version:
                raise
            version = now


def write_manifest(folder: Path, manifest: IndexManifest) -> None:
    """Writes the manifest of a version and its checksum.

    Without the checksum a manifest can be read, so a kill between the two writes does no harm.
    """
    (folder / CHECKSUM).unlink(missing_ok=True)
    text = manifest_text(manifest)
    write_text(folder / MANIFEST, text)
    write_text(folder / CHECKSUM, _checksum_line(text.encode()))


def write_new_manifest(folder: Path, manifest: IndexManifest) -> None:
    """Does what `write_manifest` does in a hidden folder that is not flushed to disk yet."""
    text = manifest_text(manifest)
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    (folder / CHECKSUM).write_text(_checksum_line(text.encode()), encoding="utf-8")


def manifest_text(manifest: IndexManifest) -> str:
    """Returns the content of the file of a manifest."""
    if manifest.segments:  # one for each write
        return manifest.model_dump_json(include=OF_VERSION)
    return manifest.model_dump_json(indent=2)


def has_checksum(folder: Path) -> bool:
    """Returns whether the manifest of a version has a checksum."""
    return (folder / CHECKSUM).is_file()


def read_manifest(folder: Path) -> IndexManifest:
    """Reads the manifest of a version, in the current or the previous schema.

    Raises:
        IndexVersionError: If the manifest is missing, invalid, a link, of another schema or
            another version, or differs from its checksum.
    """
    path = folder / MANIFEST
    try:
        checksum = None
        with suppress(FileNotFoundError):  # read first, because it is written last
            checksum = _read(folder, CHECKSUM)
        content = _read(folder, MANIFEST)
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            fault, code = "is missing", "manifest_missing"
        else:
            path = Path(error.filename or path)
            fault, code = f"cannot be read ({error.strerror})", "unreadable_file"
        reason = (
            f"{fault}: its folder is not a complete index version; activate another version, or "
            "build the index again"
        )
        raise IndexVersionError.at(path, reason, code) from error
    if checksum not in (None, _checksum_line(content).encode()):
        reason = f"differs from its checksum in {CHECKSUM}: build the index again"
        raise IndexVersionError.at(path, reason, "wrong_checksum")
    manifest = _parse_manifest(path, content)
    _check_place(folder, manifest)
    return manifest


@dataclass(frozen=True, slots=True)
class Part:
    """A segment of a version on disk."""

    key: str  # the name of its folder and its checksum: segments with equal keys are the same
    path: Path  # the file in its folder that has what is known of it; or all of it, if it is a pack
    # What is known of it; of one that was written into the index, without canaries.
    manifest: IndexManifest

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def is_packed(self) -> bool:
        return self.path.name == PACK_FILE

    def pack(self) -> bytes:
        """Returns the content of its pack; IndexVersionError if it is damaged."""
        return _read_segment(self.folder, self.key.split()[1])[1]


def read_parts(folder: Path, manifest: IndexManifest, known: Iterable[Part] = ()) -> list[Part]:
    """Reads what is known of each segment of the version in a folder, in the order of its rows.

    Those that are `known`, of other versions of the index, are not read again.

    Raises:
        IndexVersionError: If a segment is missing or invalid, or differs from its checksum.
    """
    if not manifest.segments:
        checksum = hashlib.sha256(_read(folder, MANIFEST)).hexdigest()
        return [Part(f"{folder.name} {checksum}", folder / MANIFEST, manifest)]
    by_key = {part.key: part for part in known}
    parts: list[Part] = []
    for entry in manifest.segments:
        key = f"{entry.folder} {entry.sha256}"
        if (part := by_key.get(key)) is None:
            path, content = _read_segment(folder.parent / entry.folder, entry.sha256)
            if not parts:
                found = _parse_manifest(path, content)
            else:
                found = _parse_segment(path, content, parts[0].manifest)
            part = Part(key, path, found)
        if part.manifest.count != entry.count:
            reason = f"has {part.manifest.count} rows instead of {entry.count}: build the index "
            reason += "again"
            raise IndexVersionError.at(part.path, reason, "invalid_manifest", field="count")
        parts.append(part)
    return parts


def has_segment(folder: Path) -> bool:
    """Returns whether the folder of a version has a segment that a write has added."""
    return any((folder / name).exists() for name in (PACK_FILE, SEGMENT_FILE))


def _read_segment(folder: Path, checksum: str) -> tuple[Path, bytes]:
    """Returns the file with the facts of the segment in a folder, and its content."""
    # A manifest is renamed when its version is pruned and its segment is still needed.
    for name in (PACK_FILE, SEGMENT_FILE, MANIFEST, SEGMENT_FILE):
        path = folder / name
        try:
            content = _read(folder, name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            reason = f"cannot be read ({error.strerror}): check the disk, or build the index again"
            raise IndexVersionError.at(path, reason, "unreadable_file") from error
        if hashlib.sha256(content).hexdigest() == checksum:
            return path, content
        reason = "differs from its checksum in the manifest: build the index again"
        raise IndexVersionError.at(path, reason, "wrong_checksum")
    reason = "is missing: activate another version, or build the index again"
    raise IndexVersionError.at(folder / SEGMENT_FILE, reason, "file_missing")


def _parse_segment(path: Path, content: bytes, base: IndexManifest) -> IndexManifest:
    if path.name == PACK_FILE:
        content = read_facts(path, content)
    try:
        facts = SegmentFacts.model_validate_json(content)
    except ValidationError as error:
        raise _invalid(path, error) from error
    return segment_manifest(path.parent.name, facts, base)


def segment_manifest(folder: str, facts: SegmentFacts, base: IndexManifest) -> IndexManifest:
    """Returns what is known of a segment besides the base; `folder` is the name of its folder."""
    own = {name: getattr(facts, name) for name in SegmentFacts.model_fields}
    own |= {"version": folder, "store": "faiss", "canaries": [], "segments": ()}
    return base.model_copy(update=own)


def _invalid(path: Path, error: ValidationError) -> IndexVersionError:
    first = error.errors(include_input=False, include_url=False)[0]
    field = ".".join(map(str, first["loc"])) or "the file"
    reason = f"is not a valid manifest: {field}: {first['msg']}"
    return IndexVersionError.at(path, reason, "invalid_manifest", field=field)


def _with_base(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of the manifest of a version that was written, with what is its base's.

    IndexVersionError if the base cannot be read.
    """
    if not content.get("segments"):
        return content
    entry = SegmentEntry.model_validate(content["segments"][0])
    path, text = _read_segment(folder.parent / entry.folder, entry.sha256)
    base: dict[str, Any] = parse_json(text)
    if base.get("segments"):
        reason = "is not a valid manifest: the first segment is not that of a build"
        raise IndexVersionError.at(path, reason, "invalid_manifest", field="segments")
    return base | content


def _parse_manifest(path: Path, text: bytes) -> IndexManifest:
    try:
        content = parse_json(text)
        schema = content["schema_version"]
        if schema not in range(OLDEST_SCHEMA_VERSION, SCHEMA_VERSION + 1):
            older = isinstance(schema, int) and schema < OLDEST_SCHEMA_VERSION
            reason = (
                f"has schema version {schema}; supported are {OLDEST_SCHEMA_VERSION} to "
                f"{SCHEMA_VERSION}: {'build the index again' if older else 'install a new release'}"
            )
            raise IndexVersionError.at(path, reason, "unsupported_schema", schema=schema)
        content = _with_base(path.parent, content) | {"schema_version": SCHEMA_VERSION}
        return IndexManifest.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise _invalid(path, error) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = "is not a valid manifest: it is not a JSON object with schema_version"
        raise IndexVersionError.at(path, reason, "invalid_manifest", field="") from error


def _check_place(folder: Path, manifest: IndexManifest) -> None:
    """Checks that a manifest names the folder that it is in; the folder of an index can be a link.

    Hidden folders are those of versions that are being written or deleted.
    """
    folder = folder.absolute()
    indexes = folder.parent.name, folder.parent.resolve().name
    named = manifest.version == folder.name and manifest.name in indexes
    if not (named or folder.name.startswith(".")):
        reason = (
            f"is the manifest of version {manifest.version} of index '{manifest.name}': give its "
            "folders these names, or build the index again"
        )
        fields = {"index": manifest.name, "version": manifest.version}
        raise IndexVersionError.at(folder / MANIFEST, reason, "misplaced_version", **fields)


def _read(folder: Path, name: str) -> bytes:
    """Returns a small file of a version; IndexVersionError if the file or folder is a link."""
    for path in (folder, folder / name):
        if path.is_symlink():
            raise linked(path)
    return read_small(folder / name, links=False)


def _checksum_line(manifest: bytes) -> str:
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n"


def linked(path: Path) -> IndexVersionError:
    """Returns the error for a link or a special file where a file or folder of a version is."""
    reason = "is a link or a special file: copy the file or folder itself to this place"
    return IndexVersionError.at(path, reason, "linked_file")


def schema_of(folder: Path) -> int:
    """Returns the schema version of the manifest file of a valid version."""
    return int(parse_json(_read(folder, MANIFEST))["schema_version"])


@contextmanager
def opening(folder: Path) -> Iterator[None]:
    """Turns every error of the block, which opens a version, into an IndexVersionError.

    Libraries raise errors of many kinds for files that they cannot read, also if their checksums
    are right. A full disk and other limits of the machine are no fault of the version: their errors
    stay as they are.
    """
    try:
        yield
    except CareError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            raise
        fault = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        reason = f"cannot be opened ({fault}): activate another version, or build the index again"
        raise IndexVersionError.at(folder, reason, "unreadable_version") from error
