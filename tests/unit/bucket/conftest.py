"""The rig of most tests of the bucket."""

import pytest

from tests.support.stores import Cluster


@pytest.fixture
def cluster():
    return Cluster()
