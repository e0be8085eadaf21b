"""What every metadata store refuses before it does anything, and ranges as pairs of bytes.

The limits are those of the strictest backend and hold for all of them: what was tried on one
store is not refused by the next. Does not own: what a store does with a request that passed.

A key is text that has a UTF-8 form; because UTF-8 keeps the order of code points, sorting text
and sorting its bytes are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from ister.errors import CapacityError, InvalidRequestError
from ister.metadata.base import (
    VALUE_BYTES_MAX,
    Absent,
    Compare,
    KeyValue,
    Operation,
    Put,
    RevisionIs,
    ValueIs,
)

KEY_BYTES_MAX: Final = 4096
"""Far above any key of ours; a key becomes part of each page and each error text."""

TRANSACTION_PARTS_MAX: Final = 128
"""Compares, and operations, in one transaction: `--max-txn-ops` of an etcd as it comes."""

TRANSACTION_BYTES_MAX: Final = 1_500_000
"""Keys and values of one transaction, so that it stays below etcd's 1.5 MiB with its framing."""

_PART_OVERHEAD_BYTES: Final = 64


def encode_key(key: str) -> bytes:
    """The bytes that a key is stored and sorted by.

    Raises:
        InvalidRequestError: It is empty, too long, or has no UTF-8 form.
    """
    if not key:
        raise InvalidRequestError("a metadata key is empty")
    return encode_prefix(key)


def encode_prefix(text: str) -> bytes:
    """The bytes of a prefix or a bound, which may be empty.

    Raises:
        InvalidRequestError: It is too long, or has no UTF-8 form.
    """
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the metadata key {text!r} has no UTF-8 form") from error
    if len(encoded) > KEY_BYTES_MAX:
        raise InvalidRequestError(
            f"a metadata key of {len(encoded)} bytes: at most {KEY_BYTES_MAX} are taken"
        )
    return encoded


def prefix_end(prefix: bytes) -> bytes | None:
    """The first key after all that begin with `prefix`; None where there is no end."""
    # UTF-8 has no byte 0xff, so the last one can always be raised.
    return prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else None


def change_prefix(prefix: str) -> bytes:
    """The bytes of a prefix below which all is to be removed.

    Raises:
        InvalidRequestError: It is empty, which would mean the whole store.
    """
    if not prefix:
        raise InvalidRequestError("an empty prefix would remove every key of the store")
    return encode_prefix(prefix)


def key_bounds(
    prefix: str, start: str | None, end: str | None, limit: int | None
) -> tuple[bytes, bytes | None] | None:
    """The half-open range of bytes for `MetadataStore.range`; None if nothing can be in it.

    Raises:
        InvalidRequestError: A bound has no UTF-8 form, or `limit` is negative.
    """
    if limit is not None and limit < 0:
        raise InvalidRequestError(f"a limit of {limit} keys")
    low = encode_prefix(prefix)
    high = prefix_end(low)
    if start is not None:
        low = max(low, encode_prefix(start))
    if end is not None:
        encoded = encode_prefix(end)
        high = encoded if high is None else min(high, encoded)
    if limit == 0 or (high is not None and low >= high):
        return None
    return low, high


def check_put(key: str, value: bytes) -> bytes:
    """The bytes of a key that is to be set to `value`.

    Raises:
        InvalidRequestError: The key is invalid.
        CapacityError: The value is over the limit.
    """
    if len(value) > VALUE_BYTES_MAX:
        raise CapacityError(
            f"a metadata value of {len(value)} bytes for {key}: at most {VALUE_BYTES_MAX} are taken"
        )
    return encode_key(key)


def check_transaction(compares: Sequence[Compare], operations: Sequence[Operation]) -> None:
    """Refuses a transaction that some backend could not do.

    Raises:
        InvalidRequestError: Too many parts, an invalid key, or one that is changed twice.
        CapacityError: A value, or all of it together, is over the limit.
    """
    if max(len(compares), len(operations)) > TRANSACTION_PARTS_MAX:
        raise InvalidRequestError(
            f"a metadata transaction of {len(compares)} compares and {len(operations)} "
            f"operations: at most {TRANSACTION_PARTS_MAX} of each are taken"
        )
    size_bytes = _PART_OVERHEAD_BYTES * (len(compares) + len(operations))
    for compare in compares:
        size_bytes += len(encode_key(compare.key))
        if isinstance(compare, ValueIs):
            size_bytes += len(compare.value)
    changed: set[str] = set()
    for operation in operations:
        if operation.key in changed:
            raise InvalidRequestError(f"{operation.key} is changed twice by one transaction")
        changed.add(operation.key)
        if isinstance(operation, Put):
            size_bytes += len(check_put(operation.key, operation.value)) + len(operation.value)
        else:
            size_bytes += len(encode_key(operation.key))
    if size_bytes > TRANSACTION_BYTES_MAX:
        raise CapacityError(
            f"a metadata transaction of {size_bytes} bytes: "
            f"at most {TRANSACTION_BYTES_MAX} are taken"
        )


def check_lease_time(ttl_seconds: float) -> None:
    """Refuses a lease that could not be held.

    Raises:
        InvalidRequestError: The time is not above zero, or not finite.
    """
    if not (math.isfinite(ttl_seconds) and ttl_seconds > 0):
        raise InvalidRequestError(f"a lease of {ttl_seconds} seconds")


def holds(compare: Compare, found: KeyValue | None) -> bool:
    """Whether a compare of a transaction holds for what is stored under its key."""
    if isinstance(compare, Absent):
        return found is None
    if found is None:
        return False
    if isinstance(compare, RevisionIs):
        return found.revision == compare.revision
    return found.value == compare.value
