"""Fixtures for tests of the broker."""

import pytest

from ister.broker import server


@pytest.fixture
def brokers_end_quickly(monkeypatch):
    """No other client has a call on its way to these brokers."""
    monkeypatch.setattr(server, "_LAST_SECONDS", 0.0)
