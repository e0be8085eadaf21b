"""Opens the sources of a damaged range, in a task or on the driver, and mends it.

Does not own: the choice between the sources, and the new objects (`ister.rescue.mend`).
"""

from __future__ import annotations

from contextlib import ExitStack, closing, suppress

from ister.base.model import TopicName
from ister.bucket.names import TopicKeys
from ister.client.frames import BrokerFrames
from ister.errors import IsterError, UnavailableError
from ister.rescue.mend import BROKER, LOCAL, DamagedRange, RepairResult, Source, mend, object_source
from ister.spark.location import LogLocation
from ister.spark.owners import connect
from ister.topic.stores import upload_settings


def repair_range(place: LogLocation, damaged: DamagedRange) -> RepairResult:
    """Makes the objects that are missing; the best sources come first.

    Raises:
        UnavailableError: A store does not respond.
        PermissionDeniedError: A store denies access.
    """
    history = place.history()
    keys = TopicKeys(place.config.storage.metadata.root_prefix, TopicName.parse(damaged.topic))
    with ExitStack() as stack:
        sources: list[Source] = []

        def add(source: Source) -> None:
            sources.append(source)
            stack.enter_context(closing(source.frames))

        local = place.local_tail(damaged.topic, damaged.node, damaged.incarnation)
        chunk_bytes = upload_settings(place.config.storage.uploader).read_bytes
        opened = None
        if local is not None:
            with suppress(UnavailableError):  # no checkpoint: unknown what is durable
                opened = local.source(chunk_bytes=chunk_bytes)
        if opened is not None:
            files, snapshot = opened
            add(Source(LOCAL, snapshot.trimmed, snapshot.synced, files, files))
        for described in damaged.others:
            add(object_source(history, keys, described))
        with suppress(IsterError):  # it is one source of several
            client = connect(place, damaged.topic)
            broker = BrokerFrames(client, damaged.topic, damaged.incarnation, damaged.epoch)
            add(Source(BROKER, 0, 1 << 63, broker, broker))
        if damaged.old is not None:
            # Last: the intact parts of the object itself.
            add(object_source(history, keys, damaged.old))
        return mend(history, damaged, sources)
