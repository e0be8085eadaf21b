"""What a task of `replay` does: transforms some of a chunk, and stages what comes out.

Owns: the order of these steps in a task. Does not own: reading, the user's function (`transforms`),
staged files (`ister.spark.row_staging`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from ister.base.limits import MIB
from ister.format.manifest import StagedFile
from ister.spark.jobs.transforms import Transform
from ister.spark.planner import Partition
from ister.spark.read_task import ReadTask, TopicIdentity
from ister.spark.row_staging import StagedRowFile

_SAMPLE_BYTES_MAX: Final = 256 * MIB


@dataclass(frozen=True, kw_only=True)
class ReplayPart:
    """Some of a chunk: what one task does. Pickled."""

    partition: Partition
    identities: dict[str, TopicIdentity]
    batch: int


@dataclass(frozen=True, kw_only=True)
class ReplayTask:
    """What all tasks of a replay share. Pickled."""

    task: ReadTask
    transform: Transform
    writer: str

    def stage(self, part: ReplayPart) -> tuple[int, list[StagedFile]]:
        """Transforms and stages a part; returns the number of messages read, and the files."""
        read = 0
        objects = self.task.place.history().objects
        with StagedRowFile(objects, self.writer, part.batch) as staging:
            for batch in self.task.read(part.partition, part.identities):
                if batch.num_rows:
                    read += batch.num_rows
                    for rows in self.transform.apply(batch):
                        staging.add(self.transform.target, rows)
        return read, [file for _, file in staging.files]

    def sample(self, count: int, parts: list[ReplayPart]) -> list[bytes]:
        """Returns the first transformed messages, as Arrow streams of a batch each."""
        found: list[bytes] = []
        rows = size = 0
        for part in parts:
            for batch in self.task.read(part.partition, part.identities):
                size += batch.nbytes
                for made in self.transform.apply(batch) if batch.num_rows else ():
                    taken = made.slice(0, count - rows)
                    rows += taken.num_rows
                    found.append(_to_bytes(taken))
                    if rows >= count:
                        return found
                if size > _SAMPLE_BYTES_MAX:
                    return found
        return found


def _to_bytes(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    # A slice would keep the buffers of the whole batch.
    compact = pa.RecordBatch.from_pylist(batch.to_pylist(), schema=batch.schema)
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(compact)
    data: bytes = sink.getvalue().to_pybytes()
    return data
