"""Makes `stream_data` and `stream_checkpoint`: a data directory and a query's checkpoint over it.

    python -m tests.golden.make_stream_checkpoint

They are kept as the version made them that wrote them first: a later one has to go on from there.
Make them anew only under another name, for another version of the formats.

The query copies `/default/orders` to `/default/copies` by three messages at a time. Its checkpoint
stands in the middle: batch 0 is done; batch 1 is in the sink, and Spark has not noted that it is
done; and three more messages have come since. Two messages of the source are in the bucket, the
rest in local files.
"""

import shutil
import tempfile
from pathlib import Path

import yaml

import ister
from tests.support.spark_session import get_spark

_GOLDEN = Path(__file__).resolve().parent
SOURCE, SINK = "/default/orders", "/default/copies"
BATCH = 3
BEFORE, AFTER = 5, 3


def append(config: Path, first: int, count: int) -> None:
    """Messages `order <number>`, of which the first two ever go to the bucket."""
    with ister.open(config) as log:
        topic = log.topic(SOURCE, create=True)
        for number in range(first, first + count):
            topic.append(b"order %d" % number, publish_time=1_767_225_600_000 + number)
            if number == 1:
                topic.upload()
        topic.flush()


def copy(config: Path, checkpoint: Path) -> None:
    """Runs the query with what there is."""
    query = (
        get_spark()
        .readStream.format("ister")
        .options(config=str(config), topic=SOURCE, columns="payload")
        .options(startingOffsets="earliest", maxMessagesPerTrigger=str(BATCH))
        .load()
        .writeStream.format("ister")
        .options(config=str(config), topic=SINK, checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def make(directory: Path, checkpoint: Path) -> None:
    """Both directories, with nothing in them before."""
    config = directory.with_suffix(".yml")
    # Nothing happens by itself: the result is the same every time.
    storage = {"wal": {"dir": str(directory / "wal")}, "uploader": {"engine": "none"}}
    config.write_text(yaml.safe_dump({"storage": storage}))
    append(config, 0, BEFORE)
    copy(config, checkpoint)
    for name in ("1", ".1.crc"):
        (checkpoint / "commits" / name).unlink()
    append(config, BEFORE, AFTER)


def main() -> None:
    """Replaces what is there."""
    with tempfile.TemporaryDirectory() as temporary:
        made = {name: Path(temporary) / name for name in ("stream_data", "stream_checkpoint")}
        make(*made.values())
        for name, path in made.items():
            shutil.rmtree(_GOLDEN / name, ignore_errors=True)
            # Without the lock, and without directories that are empty by now.
            ignored = shutil.ignore_patterns(".lock", ".tmp", "staging")
            shutil.copytree(path, _GOLDEN / name, ignore=ignored)


if __name__ == "__main__":
    main()
