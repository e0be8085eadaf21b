"""Fixtures for tests of the broker."""

import pytest

from ister.broker import server
from tests.support.security import GuardRig


@pytest.fixture(autouse=True)
def _brokers_end_at_once(monkeypatch):
    """No other client has a call on its way to these brokers."""
    monkeypatch.setattr(server, "_LAST_SECONDS", 0.0)


@pytest.fixture
def rig(tmp_path):
    """A guard that knows nobody but root."""
    with GuardRig(tmp_path) as rig:
        yield rig
