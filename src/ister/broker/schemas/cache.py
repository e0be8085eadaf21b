"""The registry's view of the metadata store, held in memory for checking every message.

Owns: topic settings, the subjects and definitions that messages use. The store is followed
(`ister.broker.followed`); the registry's own changes are visible at once.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import Final

from ister.base.clock import Clock
from ister.broker.followed import Followed
from ister.broker.schemas.definition import Definition
from ister.broker.schemas.definitions import read_definition
from ister.broker.schemas.subjects import SubjectStore
from ister.errors import CorruptDataError
from ister.metadata.base import KeyValue, MetadataStore
from ister.topic.schema_records import SchemaKeys, SubjectRecord, TopicConfig

_log = logging.getLogger("ister.broker.schemas")

_DEFINITIONS_HELD: Final = 128
_SUBJECTS_HELD: Final = 1024
_MISSING_HELD: Final = 4096
_MISSING_SECONDS: Final = 1.0
"""How long an unknown id is not looked up again."""


def version_number(record: SubjectRecord | None, version: int | None) -> int | None:
    """The number of a version, or of the latest one without a number; None if it does not exist."""
    entry = None
    if record is not None:
        entry = record.latest() if version is None else record.find(version)
    return None if entry is None else entry.version


class SchemaCache:
    """Topic settings, subjects and definitions in memory. Thread-safe.

    Reads the settings of all topics when it is made. Must be closed.
    """

    def __init__(
        self,
        metadata: MetadataStore,
        keys: SchemaKeys,
        subjects: SubjectStore,
        *,
        clock: Clock,
        refresh_seconds: float,
    ) -> None:
        self._metadata = metadata
        self._keys = keys
        self._subjects = subjects
        self._clock = clock
        self._lock = threading.Lock()
        self.configs: dict[str, TopicConfig] = {}
        """By topic. Replaced as a whole and never changed, so it is read without the lock."""
        self._changes = 0
        """Counts own changes: a refresh that began before one must not undo it."""
        self._held: dict[int, SubjectRecord] = {}
        self._definitions: OrderedDict[tuple[int, int], Definition] = OrderedDict()
        self._missing: dict[tuple[int, int | None], float] = {}
        self._followed = Followed(
            metadata,
            keys.root,
            lambda _: self.refresh(),
            thread="ister-schemas",
            seconds=refresh_seconds,
            log=_log,
            warning="schema settings cannot be read; the last known ones stay in use",
        )
        try:
            self.refresh()
        except BaseException:
            self._followed.close()
            raise

    def close(self) -> None:
        """Stops refreshing. May be called twice."""
        self._followed.close()

    def record(self, schema_id: int, version: int | None) -> SubjectRecord | None:
        """The subject of an id, from memory if it is known to have the version."""
        record = self._held.get(schema_id)
        if record is not None and version_number(record, version) is not None:
            return record
        now = self._clock.monotonic()
        missing = schema_id, version
        if self._missing.get(missing, now) > now:
            return record
        changes = self._changes
        record = self._subjects.find_by_id(schema_id)
        with self._lock:
            if version_number(record, version) is None:
                if len(self._missing) >= _MISSING_HELD:
                    self._missing.clear()
                self._missing[missing] = now + _MISSING_SECONDS
            if record is not None and changes == self._changes:
                if len(self._held) >= _SUBJECTS_HELD:
                    self._held.clear()
                self._held[schema_id] = record
        return record

    def definition(self, record: SubjectRecord, version: int) -> Definition:
        """A version's parsed definition."""
        key = record.schema_id, version
        with self._lock:
            known = self._definitions.get(key)
            if known is not None:
                self._definitions.move_to_end(key)
                return known
        stored = self._subjects.read_version(record, version)
        definition = read_definition(stored.type_name or stored.schema_type, stored.definition)
        with self._lock:
            self._definitions[key] = definition
            while len(self._definitions) > _DEFINITIONS_HELD:
                self._definitions.popitem(last=False)
        return definition

    # -- own changes ------------------------------------------------------------------------

    def set_config(self, topic: str, config: TopicConfig | None) -> None:
        """Replaces the settings of a topic; None removes them."""
        with self._lock:
            self._changes += 1
            configs = dict(self.configs)
            if config is None:
                configs.pop(topic, None)
            else:
                configs[topic] = config
            self.configs = configs

    def set_record(self, schema_id: int, record: SubjectRecord | None) -> None:
        """Replaces a subject that changed; without a record the next message reads it."""
        with self._lock:
            self._changes += 1
            self._missing.clear()
            if record is None:
                self._held.pop(schema_id, None)
            elif schema_id in self._held:
                self._held[schema_id] = record

    def drop_definition(self, schema_id: int, version: int) -> None:
        """Forgets the definition of a deleted version."""
        with self._lock:
            self._definitions.pop((schema_id, version), None)

    def forget_missing(self) -> None:
        """Looks unknown ids up again: a subject may have been added."""
        with self._lock:
            self._missing.clear()

    # -- the store's changes ----------------------------------------------------------------

    def refresh(self) -> None:
        """Reads the store now."""
        changes = self._changes
        configs = {}
        for found in self._metadata.range(self._keys.topics):
            config = self._read_config(found)
            if config is not None:
                configs[self._keys.topic_of(found.key)] = config
        held = {}
        for schema_id, record in list(self._held.items()):
            current = self._subjects.find(record.subject)
            if current is not None:
                held[schema_id] = current
        with self._lock:
            self._missing.clear()
            if changes == self._changes:
                self.configs, self._held = configs, held
            else:
                self._followed.wake()  # the values read may be older than an own change

    def _read_config(self, found: KeyValue) -> TopicConfig | None:
        try:
            return TopicConfig.from_json(found.value, key=found.key)
        except CorruptDataError as error:
            # One damaged record must not affect other topics.
            _log.error("schema setting cannot be read", extra={"error": str(error)})
            return self.configs.get(self._keys.topic_of(found.key))
