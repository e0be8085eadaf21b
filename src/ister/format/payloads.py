"""Rows of an Arrow batch that have a payload and nothing else.

Most published rows are like that. The offsets of the payloads suffice to check and to encode such
rows, so neither Arrow nor Python makes an object for each of them.

Owns: the rows, and the check of their offsets: after it, no payload lies outside of the data. Does
not own: how they are found in a Flight message (`ister.broker.flight.ipc`), how they are encoded
(`ister.format.arrow`).
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Self

from ister import kernels

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

FEW_ROWS: Final = 16
"""Up to this many rows are checked one by one: a call of numpy takes longer."""
_FORMATS: Final = {4: "i", 8: "q"}


class Payloads:
    """Rows with only a payload. Refers to the buffers that it was made of."""

    __slots__ = ("_offsets", "data", "num_rows", "size_bytes")

    def __init__(
        self, offsets: tuple[int, ...] | npt.NDArray[np.int64], data: memoryview, size_bytes: int
    ) -> None:
        """Makes rows of checked offsets; use `of` for others."""
        self._offsets = offsets
        self.size_bytes = size_bytes
        """The size of the buffers as they arrived."""
        self.data = data
        """The buffer with the payloads; it may have others, too."""
        self.num_rows: int = len(offsets) - 1

    @classmethod
    def of(cls, offsets: memoryview, width: int, data: memoryview, count: int) -> Self | None:
        """Returns the rows of a column.

        `offsets`, each of `width` bytes (4 or 8), say where each payload begins in `data`, and
        where the last one ends.

        Returns:
            None if an offset is wrong, or for more than `FEW_ROWS` without compiled loops.
        """
        if count < 1 or len(offsets) < width * (count + 1):
            return None
        if count <= FEW_ROWS:
            found = struct.unpack_from(f"<{count + 1}{_FORMATS[width]}", offsets)
            is_right = all(start <= end for start, end in pairwise(found))
        else:
            loaded = kernels.current()
            if loaded is None:
                return None
            numpy = loaded.numpy
            found = numpy.frombuffer(offsets, f"<i{width}", count + 1).astype("<i8")
            is_right = bool((found[:-1] <= found[1:]).all())
        if not is_right or found[0] < 0 or found[-1] > len(data):
            return None
        return cls(found, data, len(offsets) + len(data))

    @property
    def nbytes(self) -> int:
        """The bytes of the payloads plus four for each, as `pa.RecordBatch.nbytes` counts."""
        return int(self._offsets[-1]) - int(self._offsets[0]) + 4 * self.num_rows

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of offsets and payloads; only for more than `FEW_ROWS`."""
        loaded, offsets = kernels.current(), self._offsets
        if loaded is None or isinstance(offsets, tuple):
            raise ValueError("few rows have no addresses")
        data = loaded.numpy.frombuffer(self.data, "u1")
        return offsets.ctypes.data, data.ctypes.data if len(data) else 0

    def slice(self, first: int) -> Payloads:
        """Returns the rows from `first` on."""
        return Payloads(self._offsets[first:], self.data, self.size_bytes)

    def payloads(self) -> list[bytes]:
        """Returns the payloads as `bytes`."""
        return [bytes(self.data[start:end]) for start, end in pairwise(self._offsets)]

    def sizes(self) -> list[int]:
        """Returns the sizes of the payloads."""
        offsets = self._offsets
        if isinstance(offsets, tuple):
            return [end - start for start, end in pairwise(offsets)]
        sizes: list[int] = (offsets[1:] - offsets[:-1]).tolist()
        return sizes

    def to_arrow(self) -> pa.RecordBatch:
        """Returns the rows as a record batch, with a copy of their payloads."""
        import pyarrow as pa  # noqa: PLC0415 - an extra

        return pa.record_batch({"payload": pa.array(self.payloads(), pa.large_binary())})
