"""Primitives of the compiled loops: memory access, checks of UTF-8, bincode integers and blobs.

Addresses are plain 64-bit integers. Compiled into the loops of `ister.format.arrow.kernel`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar, cast

import numba
import numpy as np
from isal import isal_zlib
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NOT_ASCII: Final = -0x7F7F7F7F7F7F7F80
"""0x8080808080808080: the high bit of each of eight bytes."""
U32_END: Final = 1 << 32

# isal's wheel exports its crc32 as a plain C function, which compiled code can call.
binding.load_library_permanently(isal_zlib.__file__)
_i64 = types.int64
_crc32 = cast(
    "Callable[[np.uint32, int, int], int]",
    types.ExternalFunction("crc32_gzip_refl", types.uint32(types.uint32, _i64, _i64)),
)
memcpy = cast(
    "Callable[[int, int, int], int]", types.ExternalFunction("memcpy", _i64(_i64, _i64, _i64))
)
memcmp = cast(
    "Callable[[int, int, int], int]",
    types.ExternalFunction("memcmp", types.int32(_i64, _i64, _i64)),
)

_Emit = Callable[[ir.Context, ir.IRBuilder, object, list[ir.Value]], ir.Value]


def _loader(bits: int) -> Callable[[int], int]:
    """Makes a load of an unsigned integer from an address that need not be aligned."""

    @intrinsic
    def load(typing_context: object, address: object) -> tuple[object, _Emit]:
        def emit(
            context: ir.Context, builder: ir.IRBuilder, _: object, arguments: list[ir.Value]
        ) -> ir.Value:
            word = ir.IntType(bits)
            value = builder.load(builder.inttoptr(arguments[0], word.as_pointer()))
            value.align = 1
            return builder.zext(value, ir.IntType(64)) if bits < 64 else value

        return _i64(_i64), emit

    return cast("Callable[[int], int]", load)


def _storer(bits: int) -> Callable[[int, int], None]:
    """Makes a store of an integer's low bits to an address that need not be aligned."""

    @intrinsic
    def store(typing_context: object, address: object, value: object) -> tuple[object, _Emit]:
        def emit(
            context: ir.Context, builder: ir.IRBuilder, _: object, arguments: list[ir.Value]
        ) -> ir.Value:
            word = ir.IntType(bits)
            low = builder.trunc(arguments[1], word) if bits < 64 else arguments[1]
            builder.store(low, builder.inttoptr(arguments[0], word.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(_i64, _i64), emit

    return cast("Callable[[int, int], None]", store)


load8, _load16, load32, load64 = _loader(8), _loader(16), _loader(32), _loader(64)
store8, _store16, store32, store64 = _storer(8), _storer(16), _storer(32), _storer(64)


def part(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Marks a function that is inlined into the compiled loops that call it."""
    return cast("Callable[_P, _R]", numba.njit(forceinline=True)(function))


@part
def body_crc(at: int, size: int) -> int:
    """The crc32 of `size` bytes."""
    return int(np.int64(_crc32(np.uint32(0), at, size)))


@part
def copy(target: int, source: int, size: int, target_end: int, source_end: int) -> None:
    """Copies `size` bytes; up to the two ends it may copy more than that."""
    if size > 16 or target_end - target < 16 or source_end - source < 16:
        memcpy(target, source, size)
    elif size > 0:
        # Two moves that need no call; what they put behind the value is overwritten by the next.
        first = load64(source)
        second = load64(source + 8)
        store64(target, first)
        store64(target + 8, second)


@part
def _is_utf8(at: int, size: int) -> bool:
    """Whether Python would decode these bytes as UTF-8."""
    end = at + size
    while at < end:
        byte = load8(at)
        at += 1
        if byte < 0x80:
            continue
        low, high = 0x80, 0xBF
        if byte < 0xC2:
            return False
        if byte < 0xE0:
            more = 1
        elif byte < 0xF0:
            more = 2
            # No longer forms than needed, and no surrogates.
            if byte == 0xE0:
                low = 0xA0
            elif byte == 0xED:
                high = 0x9F
        elif byte < 0xF5:
            more = 3
            if byte == 0xF0:
                low = 0x90
            elif byte == 0xF4:
                high = 0x8F
        else:
            return False
        if end - at < more:
            return False
        byte = load8(at)
        if byte < low or byte > high:
            return False
        for _ in range(more - 1):
            at += 1
            if load8(at) & 0xC0 != 0x80:
                return False
        at += 1
    return True


@part
def _is_ascii(at: int, size: int, limit: int) -> bool:
    """Whether no byte has its high bit set; may look at bytes up to `limit`."""
    if size >= 8:
        last = at + size - 8
        seen = load64(last)
        while at < last:
            seen |= load64(at)
            at += 8
        return bool(seen & _NOT_ASCII == 0)
    if size == 0:
        return True
    if limit - at >= 8:
        return bool((load64(at) << (64 - 8 * size)) & _NOT_ASCII == 0)
    seen = 0
    for byte in range(size):
        seen |= load8(at + byte)
    return bool(seen < 0x80)


@part
def read_integer(at: int, end: int, is_varint: int) -> tuple[int, int]:
    """The integer at an address, and the address behind it, 0 if there is none."""
    if is_varint:
        if at >= end:
            return 0, 0
        tag = load8(at)
        at += 1
        if tag < 251:
            return tag, at
        if tag == 251:
            if end - at < 2:
                return 0, 0
            value = _load16(at)
            return value, (at + 2 if value >= 251 else 0)
        if tag == 252:
            if end - at < 4:
                return 0, 0
            value = load32(at)
            return value, (at + 4 if value >= 1 << 16 else 0)
        if tag > 253 or end - at < 8:
            return 0, 0
        value = load64(at)
        return value, (at + 8 if value < 0 or value >= U32_END else 0)
    if end - at < 8:
        return 0, 0
    return load64(at), at + 8


@part
def read_blob(at: int, end: int, is_varint: int) -> tuple[int, int]:
    """The address of a blob's first byte, and the one behind its last, 0 if there is none."""
    size, start = read_integer(at, end, is_varint)
    if start == 0 or size < 0 or size > end - start:
        return 0, 0
    return start, start + size


@part
def read_text(at: int, end: int, is_varint: int, limit: int) -> tuple[int, int]:
    """As `read_blob`, and it has to be UTF-8; may look at bytes up to `limit`."""
    start, stop = read_blob(at, end, is_varint)
    if stop == 0 or not (_is_ascii(start, stop - start, limit) or _is_utf8(start, stop - start)):
        return 0, 0
    return start, stop


@part
def is_known_key(scratch: int, count: int, key: int, size: int) -> bool:
    """Whether a key is one of the `count` before it; remembers it otherwise."""
    for other in range(count):
        if (
            load64(scratch + 16 * other + 8) == size
            and memcmp(load64(scratch + 16 * other), key, size) == 0
        ):
            return True
    store64(scratch + 16 * count, key)
    store64(scratch + 16 * count + 8, size)
    return False


@part
def mark_valid(bits: int, row: int, is_valid: int) -> None:
    """Says whether a row is not null; rows are marked in order, so that each byte begins at 0."""
    at = bits + (row >> 3)
    if row & 7 == 0:
        store8(at, is_valid)
    else:
        store8(at, load8(at) | (is_valid << (row & 7)))


@part
def integer_bytes(value: int, is_varint: int) -> int:
    """How many bytes an integer takes."""
    if not is_varint:
        return 8
    if value < 0 or value >= U32_END:
        return 9
    if value < 251:
        return 1
    return 3 if value < 1 << 16 else 5


@part
def put_integer(at: int, value: int, is_varint: int) -> int:
    """Writes an integer; returns the address behind it."""
    if not is_varint:
        store64(at, value)
        return at + 8
    if value < 0 or value >= U32_END:
        store8(at, 253)
        store64(at + 1, value)
        return at + 9
    if value < 251:
        store8(at, value)
        return at + 1
    if value < 1 << 16:
        store8(at, 251)
        _store16(at + 1, value)
        return at + 3
    store8(at, 252)
    store32(at + 1, value)
    return at + 5


@part
def put_blob(  # noqa: PLR0917
    at: int, value: int, size: int, is_varint: int, at_end: int, value_end: int
) -> int:
    """Writes a length and so many bytes; returns the address behind them."""
    at = put_integer(at, size, is_varint)
    copy(at, value, size, at_end, value_end)
    return at + size
