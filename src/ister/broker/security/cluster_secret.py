"""The secret that brokers of one metadata store share.

    <root>/cluster/secret   64 hex digits, written by the first broker that needs it

Owns: the key. The secret proves that a call comes from a broker, which allows one thing: to publish
a dead letter (`ister.broker.services.peers`); and that a broker wrote a dead letter
(`ister.broker.dispatch.dead_letters`). It is no risk in the metadata store: whoever can read
that can also change the rights in it.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from ister.errors import CommitUnknownError, UnavailableError
from ister.metadata.base import Absent, MetadataStore, Put


def read_secret(store: MetadataStore, *, root_prefix: str) -> str:
    """Returns the secret; creates it if there is none. Blocks."""
    key = f"{root_prefix}/cluster/secret"
    found = store.get(key)
    if found is None:
        with suppress(CommitUnknownError):  # read back
            store.transact([Absent(key)], [Put(key, secrets.token_hex(32).encode())])
        found = store.get(key)
    if found is None or not found.value:
        raise UnavailableError("the cluster secret cannot be read")
    return found.value.decode("ascii", "replace")
