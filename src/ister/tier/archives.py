"""Opens an object in Parquet, if it is the one that its descriptor says.

Owns: loading what needs pyarrow, which is an extra, and comparing descriptor and footer. Does not
own: the file (`ister.format.archive`), what happens when it is damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ister.errors import CorruptDataError
from ister.extras import missing_extra
from ister.format.descriptor import ObjectDescriptor

if TYPE_CHECKING:
    from types import ModuleType

    from ister.format.archive import ArchiveReader

__all__ = ["load_archives", "open_archive"]


def load_archives() -> ModuleType:
    """The module `ister.format.archive`.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        from ister.format import archive  # noqa: PLC0415 - needs pyarrow, an extra
    except ImportError as error:
        raise missing_extra("an object in Parquet", "arrow", error) from error
    return archive


def open_archive(
    read: Callable[[int, int], bytes], described: ObjectDescriptor, *, path: str, topic: str
) -> ArchiveReader:
    """Reads the footer of an archive.

    Args:
        read: (position, size) → bytes of the object.
        described: What it should be. One without a checksum was found damaged when metadata was
            rebuilt: only its range is known.
        path: For errors.
        topic: The topic's name.

    Raises:
        CorruptDataError: It is not one, or another one.
        UnsupportedVersionError: A newer Ister wrote it.
        ConfigError: pyarrow is not installed.
    """
    archive: ArchiveReader = load_archives().ArchiveReader(
        read, described.size_bytes, path=path, topic=topic
    )
    found: tuple[object, ...] = (archive.start, archive.end)
    wanted: tuple[object, ...] = (described.start, described.end)
    if described.checksum is not None:
        found += (archive.codec, archive.kept, archive.rows)
        wanted += (described.codec, described.kept, described.messages)
    if found != wanted:
        raise CorruptDataError(
            f"damaged object: it says {found} about itself, not {wanted}",
            topic=topic,
            path=path,
            offset=described.start,
        )
    return archive
