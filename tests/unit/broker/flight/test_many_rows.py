"""Calls with many rows wait for the compiled loops, if this machine has them."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from ister import kernels
from ister.base.limits import LOAD_SECONDS, MANY_ROWS
from ister.broker.flight.broker_source import BrokerSource
from ister.broker.flight.reads import read_range
from ister.wire.contract import RangeTicket

TOPIC = "/default/orders"


@pytest.fixture
def steps(monkeypatch):
    found = []
    monkeypatch.setattr(kernels, "load_cached", found.append)
    return found


@pytest.mark.parametrize(("rows", "waits"), [(MANY_ROWS, [LOAD_SECONDS]), (MANY_ROWS - 1, [])])
def test_staged_rows_are_appended_by_compiled_loops(steps, rows, waits):
    served = SimpleNamespace(sequenced=object())
    topics = SimpleNamespace(
        find_open=lambda name: served,
        admission=None,
        log=SimpleNamespace(append_staged=lambda name, staged, gate: steps.append("append")),
    )
    source = BrokerSource(topics, SimpleNamespace(time=lambda: 0.0))
    source.append_staged(TOPIC, SimpleNamespace(rows=rows), "", lambda: False)
    assert steps == [*waits, "append"]


@pytest.mark.parametrize(("rows", "waits"), [(MANY_ROWS, [LOAD_SECONDS]), (MANY_ROWS - 1, [])])
def test_a_range_is_read_by_compiled_loops(steps, rows, waits):
    def read_arrow(start, end, columns):
        steps.append("read")
        yield pa.record_batch({"offset": pa.array(range(start, end), pa.int64())})

    ticket = RangeTicket(topic=TOPIC, incarnation="x", start=0, end=rows, columns=("offset",))
    schema = pa.schema([("offset", pa.int64())])
    found = read_range(SimpleNamespace(read_arrow=read_arrow), ticket, lambda: None, schema)
    assert sum(batch.num_rows for batch in found) == rows
    assert steps == [*waits, "read"]
