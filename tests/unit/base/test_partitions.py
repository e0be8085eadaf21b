"""Partitions are chosen as Danube's clients choose them."""

import pytest

from ister.base.partitions import base_of_partition, hash_key, partition_of
from tests.support.cases import each


@each(
    ("key", "expected"),
    [("", 0xCBF29CE484222325), ("a", 0xAF63DC4C8601EC8C), ("foobar", 0x85944171F73967E8)],
)
def test_the_hash_is_fnv_1a_of_64_bits(key, expected):
    assert hash_key(key) == expected


def test_keys_go_where_danubes_own_client_sends_them():
    router = pytest.importorskip("danube.message_router")
    for key in ("", "a", "order-17", "Grüße", "日本", "x" * 300):
        for partitions in (1, 2, 3, 7, 16):
            made = router.MessageRouter(partitions)
            assert partition_of(key, partitions) == made.key_route(key)


@each(
    ("topic", "base"),
    [
        ("/default/orders-part-0", "/default/orders"),
        ("/default/orders-part-12", "/default/orders"),
        ("/default/a-part-1-part-2", "/default/a-part-1"),
        ("/default/orders", None),
        ("/default/orders-part-", None),
        ("/default/orders-part-01", None),
        ("/default/orders-part-1x", None),
        ("/default/orders-part-1\n", None),
        ("/default/orders-part-٣", None),
    ],
)
def test_base_of_a_partition(topic, base):
    assert base_of_partition(topic) == base
