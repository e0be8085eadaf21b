"""Manifests: which staged files a batch of rows is made of, as JSON.

    {"version": 1, "files": [{"key": …, "rows": …, "size": …}]}        in the order of the rows

What is in the files is `ister.format.staged_rows`'s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ister.errors import CorruptDataError, UnsupportedVersionError

_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """One file of rows."""

    key: str
    rows: int
    size_bytes: int


def encode_manifest(files: Sequence[StagedFile]) -> bytes:
    """The list of files a batch is made of, in their order."""
    listed = [{"key": file.key, "rows": file.rows, "size": file.size_bytes} for file in files]
    return json.dumps({"version": _VERSION, "files": listed}, separators=(",", ":")).encode()


def decode_manifest(data: bytes, *, key: str) -> tuple[StagedFile, ...]:
    """Reads a manifest.

    Raises:
        CorruptDataError: It is something else.
        UnsupportedVersionError: A newer Ister wrote it.
    """
    try:
        fields = json.loads(data)
        if fields["version"] != _VERSION:
            raise UnsupportedVersionError(
                f"a manifest of version {fields['version']}",
                path=key,
                hint="finish the batch with the newer Ister that began it",
            )
        return tuple(
            StagedFile(key=str(f["key"]), rows=int(f["rows"]), size_bytes=int(f["size"]))
            for f in fields["files"]
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CorruptDataError(f"not a manifest: {error!r}", path=key) from error
