"""A batch of Spark's sink of which some rows are in a topic, beside jobs that work on that topic.

The driver of a query has died in the middle of its commit, and the next one comes later: staged
files, the record of an open batch, and its first rows are there meanwhile. The files look two days
old, so that only the record keeps them.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pyarrow as pa

from ister.base import failpoints
from ister.base.model import TopicName
from ister.bucket.names import staging_prefix
from ister.format.manifest import StagedFile
from ister.format.staged_rows import STAGED_SCHEMA, digest_rows, encode_block
from ister.topic import batches
from ister.topic.batches import AppendedBatch, StagedBatch
from ister.topic.log import Log

__all__ = ["OpenBatch", "Sent"]

_WRITER = "query"
_OLD_SECONDS = 2 * 86_400


class Sent(NamedTuple):
    """A message, as it was sent; or a row, as a task of the query stages it."""

    payload: bytes
    key: str | None
    time_ms: int

    @property
    def fits(self) -> bool:
        """Whether it is of the schema that exports have."""
        return self.payload.startswith(b"{")


class OpenBatch:
    """See the module header.

    Args:
        bucket: The directory of the bucket.
        topic: Where its rows go.
        number: Of the batch; each is higher than the one before.
        rows: In the order in which they get into the topic.
        chance: How they are spread over files and blocks.
    """

    def __init__(
        self,
        bucket: Path,
        topic: str,
        number: int,
        rows: Sequence[Sent],
        chance: random.Random,
    ) -> None:
        self.topic = topic
        self.rows = list(rows)
        self.start = 0
        """No row of it has a lower offset."""
        self.have = 0
        """How many rows the dead driver has left in the topic: the first ones."""
        self._bucket = bucket
        self.number = number
        self._chance = chance
        self._files = self._blocks = 0

    def begin(self, log: Log) -> None:
        """Appends some rows, perhaps none, perhaps all, and does not say that the batch is done."""
        topic = log.topic(self.topic)
        self.start = topic.watermarks.next
        staged = self._stage(self.rows)
        point = self._chance.choice(["batch.after_begin", *3 * ["batch.after_rows"]])
        visits = itertools.count(1)
        last = self._chance.randint(1, self._blocks)

        def die() -> None:
            if next(visits) == last or point == "batch.after_begin":
                raise _DeadError

        failpoints.arm(point, die)
        try:
            # A part for each block, so that a driver can die between any two.
            with patch.object(batches, "_JOINED_BYTES_MIN", 0):
                log.append_staged(self.topic, staged)
        except _DeadError:
            self.have = topic.watermarks.next - self.start
        else:
            raise AssertionError("the driver did not die")
        finally:
            failpoints.disarm()
        old = time.time() - _OLD_SECONDS
        for path in self._staged():
            os.utime(path, (old, old))

    def finish(self, log: Log) -> int:
        """The next driver asks again; the offset of the first row that it appends.

        If some rows are in, those that follow come from the dead driver's files, whatever order the
        new ones have.
        """
        assert self._staged(), "the files of an open batch are gone"
        rows = self._chance.sample(self.rows, len(self.rows)) if self.have else self.rows
        before = log.topic(self.topic).watermarks.next
        done = log.append_staged(self.topic, self._stage(rows))
        self._check(done)
        assert log.topic(self.topic).watermarks.next == before + len(self.rows) - self.have
        # It was done, and the query did not hear of it.
        again = log.append_staged(self.topic, self._stage(rows))
        assert again.is_known
        self._check(again)
        if self.have:
            # Else the batch was begun anew, and its first files go when somebody collects.
            assert not self._staged(), "the files of a batch that is done are there"
        return before

    def _check(self, done: AppendedBatch) -> None:
        assert done.rows == len(self.rows)
        assert not done.is_other, "other rows than those that were staged first"
        assert done.start >= self.start

    def _stage(self, rows: Sequence[Sent]) -> StagedBatch:
        """Two files of small blocks."""
        cut = self._chance.randint(0, len(rows))
        files = [self._stage_file(part) for part in (rows[:cut], rows[cut:]) if part]
        return StagedBatch(writer=_WRITER, batch=self.number, files=tuple(files))

    def _stage_file(self, rows: Sequence[Sent]) -> StagedFile:
        data, digest, at = b"", 0, 0
        while at < len(rows):
            size = self._chance.randint(1, 4)
            block = _as_arrow(rows[at : at + size])
            header, body = encode_block(block, "")
            data += header + body.to_pybytes()
            digest += digest_rows(block)
            self._blocks += 1
            at += size
        self._files += 1
        prefix = staging_prefix(TopicName.parse(self.topic), _WRITER, self.number)
        key = f"{prefix}part-{self._files}.arrow"
        path = self._bucket / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return StagedFile(
            key=key,
            rows=len(rows),
            size_bytes=len(data),
            digest=digest % batches.DIGEST_MODULUS,
        )

    def _staged(self) -> list[Path]:
        """The files of this batch."""
        prefix = staging_prefix(TopicName.parse(self.topic), _WRITER, self.number)
        return [path for path in (self._bucket / prefix).rglob("*") if path.is_file()]


class _DeadError(Exception):
    """A driver is dead."""


def _as_arrow(rows: Sequence[Sent]) -> pa.RecordBatch:
    fields = [
        {
            "publish_time": datetime.fromtimestamp(row.time_ms / 1000, UTC),
            "producer_name": "spark",
            "payload": row.payload,
            "routing_key": row.key,
        }
        for row in rows
    ]
    return pa.RecordBatch.from_pylist(fields, schema=STAGED_SCHEMA)
