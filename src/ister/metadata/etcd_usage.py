"""How full etcd is: its size, its quota, alarms, and whether it is compacted."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Final

from ister.errors import PermissionDeniedError
from ister.metadata.base import StoreUsage
from ister.metadata.checks import encode_key
from ister.metadata.etcd_endpoint import Endpoint, Message
from ister.metadata.etcd_errors import CompactedError

_CHANGES_KEPT_MAX: Final = 500_000
"""An etcd that still has the versions from this many changes ago is not compacted."""
_QUOTA_DEFAULT_BYTES: Final = 2 * 1024**3
# Of StatusResponse, since etcd 3.6.
_QUOTA_FIELD: Final = 12


def read_usage(
    rpc: Message, read: Callable[[str, Callable[[Endpoint], Message], Message], Message], key: str
) -> StoreUsage | None:
    """How full the member that answers is; None if this user may not know.

    Args:
        rpc: The messages of `aetcd`.
        read: Sends a request by a method of an endpoint.
        key: One that the user may read.
    """

    def is_compacted(revision: int) -> bool:
        request = rpc.RangeRequest(key=encode_key(key), revision=revision, count_only=True)
        try:
            read("read of an old revision", lambda endpoint: endpoint.kv.Range, request)
        except (CompactedError, PermissionDeniedError):
            return True
        return False

    try:
        status = read("status", lambda endpoint: endpoint.maintenance.Status, rpc.StatusRequest())
    except PermissionDeniedError:
        return None
    oldest = int(status.header.revision) - _CHANGES_KEPT_MAX
    return StoreUsage(
        size_bytes=int(status.dbSize),
        used_bytes=int(status.dbSizeInUse),
        quota_bytes=_quota_of(status),
        is_compacted=oldest <= 0 or is_compacted(oldest),
        alarms=tuple(error.strip() for error in status.errors),
    )


def _quota_of(status: Message) -> int:
    """The quota of a member; etcd's default before 3.6, which does not report it."""
    unknown = importlib.import_module("google.protobuf.unknown_fields")
    # `aetcd` does not know the field. Without a quota, it is the largest number.
    told = [
        int(field.data)
        for field in unknown.UnknownFieldSet(status)
        if field.field_number == _QUOTA_FIELD
    ]
    return told[0] if told and told[0] > 0 else _QUOTA_DEFAULT_BYTES
