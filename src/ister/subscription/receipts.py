"""Receipts: sent with each message, and required for its acknowledgement.

Without one, an acknowledgement could name any offset: of a topic that was deleted and created
again, or of a message that was never delivered. A receipt is a keyed hash of the consumer and the
offset. The key is stored with the subscription, so receipts stay valid after a restart and on
another broker, and a subscription that is created again has another key. A valid receipt proves
that this subscription of this topic has delivered the message to this consumer. Its last byte is
not part of the hash: it is the attempt, which a client could change.

Danube's clients send a message's id back unchanged, so there the receipt is part of the id: the
fragment of its broker address, `http://broker:6650#<consumer>.<hash>`.

Values, and a few hashes that are needed again soon.
"""

from __future__ import annotations

import re
import secrets
from hashlib import blake2b
from struct import Struct
from typing import Final

ATTEMPT_MAX: Final = 255
"""Of a receipt; later attempts have this number, too."""

_KEY_BYTES: Final = 16
# One hash has the receipts of so many neighbours: each message needs two, to make and to check it.
_NEIGHBOURS: Final = 8
_HASHED: Final = Struct("<QQ")
_HASHES: Final = Struct(f">{_NEIGHBOURS}Q")
_CACHED_MAX: Final = 128
# Of a receipt, the last two of which are the attempt.
_DIGITS: Final = 16
_LAST_DIGITS: Final = [b"%02x" % attempt for attempt in range(ATTEMPT_MAX + 1)]
_STAMP: Final = re.compile(r"#([0-9a-f]{1,16})\.([0-9a-f]{16})\Z")


def new_key() -> str:
    """A key for a subscription's receipts, as it is stored."""
    return secrets.token_hex(_KEY_BYTES)


class Receipts:
    """Makes and checks the receipts of one subscription."""

    __slots__ = ("_cached", "_digits", "_hash")

    def __init__(self, key: str) -> None:
        """Uses the key of a subscription."""
        self._hash = blake2b(key=key.encode(), digest_size=_HASHES.size)
        self._cached: dict[tuple[int, int], list[int]] = {}
        self._digits: dict[tuple[int, int], bytes] = {}

    def token(self, consumer: int, offset: int, attempt: int = 1) -> int:
        """The receipt of a message that was delivered to a consumer; 64 bits."""
        place = (consumer, offset // _NEIGHBOURS)
        hashes = self._cached.get(place)
        if hashes is None:
            hashes = self._make(place)
        last = attempt if attempt < ATTEMPT_MAX else ATTEMPT_MAX
        return hashes[offset % _NEIGHBOURS] | last

    def _make(self, place: tuple[int, int]) -> list[int]:
        made = self._hash.copy()
        made.update(_HASHED.pack(*place))
        if len(self._cached) >= _CACHED_MAX:
            self._cached.clear()
            self._digits.clear()
        digest = made.digest()
        hashes = [one & ~ATTEMPT_MAX for one in _HASHES.unpack(digest)]
        self._cached[place] = hashes
        self._digits[place] = digest.hex().encode()
        return hashes

    def hexadecimal(self, consumer: int, offset: int, attempt: int = 1) -> bytes:
        """The receipt of `token` as `stamp` writes it."""
        place = (consumer, offset // _NEIGHBOURS)
        digits = self._digits.get(place)
        if digits is None:
            self._make(place)
            digits = self._digits[place]
        at = offset % _NEIGHBOURS * _DIGITS
        last = attempt if attempt < ATTEMPT_MAX else ATTEMPT_MAX
        return digits[at : at + _DIGITS - 2] + _LAST_DIGITS[last]

    def find_attempt(self, token: int, consumer: int, offset: int) -> int | None:
        """The attempt that a receipt is of; None if the receipt is not valid."""
        attempt = token & ATTEMPT_MAX
        return attempt if self.token(consumer, offset, attempt) == token else None

    def stamp(self, address: str, consumer: int, offset: int, attempt: int = 1) -> str:
        """Appends the receipt to a broker address."""
        return f"{address}#{consumer:x}.{self.token(consumer, offset, attempt):016x}"

    def find_delivery(self, stamped: str, offset: int) -> tuple[int, int] | None:
        """The consumer that a message was delivered to, and the attempt; None if not valid."""
        found = _STAMP.search(stamped)
        if found is None:
            return None
        consumer = int(found[1], 16)
        attempt = self.find_attempt(int(found[2], 16), consumer, offset)
        return None if attempt is None else (consumer, attempt)
