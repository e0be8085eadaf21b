"""Fixtures for tests of the cluster's control plane."""

import pytest

from tests.support.cluster import BrokerSite


@pytest.fixture
def site():
    with BrokerSite() as site:
        yield site
