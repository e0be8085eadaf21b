"""Manifests: which staged files a batch of rows is made of, as JSON.

    {"version": 2, "files": [{"key": …, "position": …, "rows": …, "size": …, "digest": …}]}

Files are listed in the order of the rows, one entry for each segment. Version 1 has no positions:
each file has rows of one topic only, from its first byte to its last one. A short manifest is part
of the writer's record (`ister.format.records`), a longer one is an object.

What is in the files is `ister.format.staged_rows`'s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ister.errors import CorruptDataError, UnsupportedVersionError

_VERSIONS: Final = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """Rows of one topic: a segment of a staged file, or all of a file of version 1."""

    key: str
    rows: int
    size_bytes: int
    """Of the segment."""
    position: int | None = None
    """Where the segment begins; None for a file that has nothing else."""
    digest: int | None = None
    """Of its rows (`ister.format.staged_rows.digest_rows`); None if an earlier version wrote it."""


def manifest_fields(files: Sequence[StagedFile]) -> dict[str, object]:
    """Returns the JSON object that lists the files of a batch, in their order."""
    listed = [
        {"key": file.key}
        | ({} if file.position is None else {"position": file.position})
        | {"rows": file.rows, "size": file.size_bytes}
        | ({} if file.digest is None else {"digest": file.digest})
        for file in files
    ]
    version = 1 if all(file.position is None for file in files) else 2
    return {"version": version, "files": listed}


def encode_manifest(files: Sequence[StagedFile]) -> bytes:
    """The list of files a batch is made of, in their order."""
    return json.dumps(manifest_fields(files), separators=(",", ":")).encode()


def decode_manifest(data: bytes, *, key: str) -> tuple[StagedFile, ...]:
    """Reads a manifest.

    Raises:
        CorruptDataError: It is something else.
        UnsupportedVersionError: A newer Ister wrote it.
    """
    try:
        fields = json.loads(data)
        if fields["version"] not in _VERSIONS:
            raise UnsupportedVersionError(
                f"a manifest of version {fields['version']}",
                path=key,
                hint="finish the batch with the newer Ister that began it",
            )
        return tuple(
            StagedFile(
                key=str(f["key"]),
                rows=int(f["rows"]),
                size_bytes=int(f["size"]),
                position=int(f["position"]) if "position" in f else None,
                digest=int(f["digest"]) if "digest" in f else None,
            )
            for f in fields["files"]
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CorruptDataError(f"not a manifest: {error!r}", path=key) from error
