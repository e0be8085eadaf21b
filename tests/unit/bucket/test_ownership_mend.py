"""The pointer to the newest object: put right, and put right with what is removed."""

import pytest

from ister.errors import FencedError
from ister.format.descriptor import encode_descriptor
from ister.format.records import decode_current, encode_current
from tests.support.stores import Cluster, Frames, a_descriptor


@pytest.fixture
def cluster():
    return Cluster()


def current(cluster):
    found = cluster.metadata.get(cluster.keys.current)
    return decode_current(found.value, key=found.key)


@pytest.mark.parametrize("value", [encode_current(0), encode_current(20, 40), b"nonsense", None])
def test_a_wrong_pointer_is_set(cluster, value):
    owned = cluster.filled(Frames([b"x"] * 30), 10, 20, 30)
    if value is None:
        cluster.metadata.delete(cluster.keys.current)
    else:
        cluster.metadata.put(cluster.keys.current, value)
    assert owned.mend_current()
    assert current(cluster) == 20
    assert not owned.mend_current(), "it is right now"
    owned.commit(a_descriptor(30, 40))
    assert current(cluster) == 30


def test_without_objects_there_is_nothing_to_point_at(cluster):
    assert not cluster.claim("a").mend_current()


def test_a_fenced_owner_sets_nothing(cluster):
    owned = cluster.filled(Frames([b"x"] * 20), 10, 20)
    cluster.metadata.put(cluster.keys.current, encode_current(0))
    cluster.claim("a")
    with pytest.raises(FencedError):
        owned.mend_current()
    assert current(cluster) == 0


def test_the_pointer_goes_with_a_descriptor_that_is_removed(cluster):
    owned = cluster.filled(Frames([b"x"] * 20), 10, 20)
    covered = a_descriptor(15, 20)
    revision = cluster.metadata.put(cluster.keys.descriptor(15), encode_descriptor(covered))
    cluster.metadata.put(cluster.keys.current, encode_current(15))
    assert owned.refresh()
    assert owned.last.start == 15
    assert owned.remove(covered, revision)
    assert current(cluster) == 10
    assert (owned.last.start, owned.tiered) == (10, 20)
    owned.commit(a_descriptor(20, 25))


def test_a_descriptor_that_has_changed_is_not_removed(cluster):
    owned = cluster.filled(Frames([b"x"] * 20), 10, 20)
    covered = a_descriptor(15, 20)
    revision = cluster.metadata.put(cluster.keys.descriptor(15), encode_descriptor(covered))
    cluster.metadata.put(cluster.keys.descriptor(15), encode_descriptor(a_descriptor(15, 19)))
    assert not owned.remove(covered, revision)
    assert cluster.metadata.get(cluster.keys.descriptor(15)) is not None
