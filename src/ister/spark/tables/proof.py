"""Checks that the files of a commit exist, with their sizes, before a table refers to them.

Owns: the check right before each attempt at a commit, and its errors. Does not own: access to
stores.

A task may have written a file elsewhere, such as into a directory of its own machine, or the file
may have been deleted since. Ranges committed with missing files would never be exported again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ister.errors import CorruptDataError, NotFoundError
from ister.spark.tables.base import Addition, DataFile

_THREADS: Final = 8
_FEW: Final = 4
_ON_A_DISK: Final = (
    "if tasks ran on other machines, each has a directory of this name of its own: export to a "
    "bucket, or to a directory that all machines share"
)
_IN_A_BUCKET: Final = (
    "something else removes files of the table; run the export again, it rewrites them"
)


def prove_files(
    addition: Addition, size_of: Callable[[str], int | None], *, location: str, is_local: bool
) -> None:
    """Checks that all files of a commit exist, with the sizes that tasks wrote.

    Args:
        addition: The commit.
        size_of: Returns the size of a file in bytes, or None; called from several threads.
        location: The table, for people.
        is_local: Whether it is in a directory.

    Raises:
        NotFoundError: A file is not there.
        CorruptDataError: A file has another size.
        UnavailableError: The store does not answer.
    """
    files = [(item.topic, file) for item in addition.topics for file in item.files]
    sizes = _sizes([file for _, file in files], size_of)
    missing = [one for one, size in zip(files, sizes, strict=True) if size is None]
    if missing:
        topic, first = missing[0]
        raise NotFoundError(
            f"{len(missing)} of {len(files)} files that tasks have written are not in the table's "
            f"place, among them one with the offsets {_shown(first)}; nothing was committed",
            topic=topic,
            offset=first.first_offset,
            path=f"{location}/{first.path}",
            hint=_ON_A_DISK if is_local else _IN_A_BUCKET,
        )
    for (topic, file), size in zip(files, sizes, strict=True):
        if size != file.bytes:
            raise CorruptDataError(
                f"a file with the offsets {_shown(file)} has {size} bytes, and {file.bytes} were "
                "written; nothing was committed",
                topic=topic,
                offset=file.first_offset,
                path=f"{location}/{file.path}",
                hint="run the export again: it rewrites the file",
            )


def _sizes(files: Sequence[DataFile], size_of: Callable[[str], int | None]) -> list[int | None]:
    if len(files) <= _FEW:
        return [size_of(file.path) for file in files]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ister-export-proof") as pool:
        return list(pool.map(size_of, [file.path for file in files]))


def _shown(file: DataFile) -> str:
    return f"{file.first_offset} up to {file.last_offset + 1}"
