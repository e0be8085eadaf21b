"""Receipts: what goes out with a message, and comes back with its acknowledgement.

An acknowledgement without one could name any offset: of a topic that was deleted and made again, of
a message that was never delivered. A receipt is a keyed hash of the consumer and the offset. Its
key belongs to the subscription and is stored with it, so it is known again after a restart and to
another broker, and a subscription that is made anew has another one. So whoever has a receipt was
given the message, by this subscription of this topic, and the consumer's id in it is true. Its last
byte is no part of the hash: it says which attempt it was, as far as one believes the client.

Danube's clients send a message's id back as it came, so there a receipt is a part of the id: the
fragment of its broker address, `http://broker:6650#<consumer>.<hash>`.

Values only.
"""

from __future__ import annotations

import re
import secrets
from hashlib import blake2b
from struct import Struct
from typing import Final

__all__ = ["ATTEMPT_MAX", "Receipts", "new_key"]

ATTEMPT_MAX: Final = 255
"""Of a receipt; later attempts have this number, too."""

_KEY_BYTES: Final = 16
_HASHED: Final = Struct("<QQ")
_STAMP: Final = re.compile(r"#([0-9a-f]{1,16})\.([0-9a-f]{16})\Z")


def new_key() -> str:
    """A key for a subscription's receipts, as it is stored."""
    return secrets.token_hex(_KEY_BYTES)


class Receipts:
    """Makes and checks the receipts of one subscription."""

    __slots__ = ("_hash",)

    def __init__(self, key: str) -> None:
        """Takes the subscription's key.

        Args:
            key: As `new_key` made it.
        """
        self._hash = blake2b(key=key.encode(), digest_size=8)

    def token(self, consumer: int, offset: int, attempt: int = 1) -> int:
        """The receipt of a message that was delivered to a consumer; 64 bits."""
        made = self._hash.copy()
        made.update(_HASHED.pack(consumer, offset))
        hashed = int.from_bytes(made.digest(), "big")
        return hashed & ~ATTEMPT_MAX | min(attempt, ATTEMPT_MAX)

    def find_attempt(self, token: int, consumer: int, offset: int) -> int | None:
        """Which attempt a receipt is of; None if it is none of ours."""
        attempt = token & ATTEMPT_MAX
        return attempt if self.token(consumer, offset, attempt) == token else None

    def stamp(self, address: str, consumer: int, offset: int, attempt: int = 1) -> str:
        """A broker address with the receipt behind it."""
        return f"{address}#{consumer:x}.{self.token(consumer, offset, attempt):016x}"

    def find_delivery(self, stamped: str, offset: int) -> tuple[int, int] | None:
        """The consumer that a message was delivered to, and the attempt; None if it was not."""
        found = _STAMP.search(stamped)
        if found is None:
            return None
        consumer = int(found[1], 16)
        attempt = self.find_attempt(int(found[2], 16), consumer, offset)
        return None if attempt is None else (consumer, attempt)
