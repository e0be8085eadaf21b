"""The names that a broker knows: partitions of each, and what making a topic costs."""

from ister.base import partitions
from ister.base.partitions import parse_partition
from ister.broker.topics.listing import TopicNameIndex
from tests.support.broker import some_topics


def test_partitions_are_found_in_their_order():
    names = TopicNameIndex(
        ["/d/a", *(f"/d/p-part-{number}" for number in (10, 2, 0)), "/d/p-part-x"]
    )
    assert names.partitions_of("/d/p") == ["/d/p-part-0", "/d/p-part-2", "/d/p-part-10"]
    assert names.partitions_of("/d/a") == names.partitions_of("/d") == []
    assert "/d/p" not in names
    assert {"/d/a", "/d/p-part-x"} < set(names)
    assert len(names) == 5
    for number in (0, 2, 10):
        names.discard(f"/d/p-part-{number}")
        names.discard(f"/d/p-part-{number}")
    assert names.partitions_of("/d/p") == []
    assert set(names) == {"/d/a", "/d/p-part-x"}


def test_partition_of_a_partition_belongs_to_it():
    assert parse_partition("/d/p-part-1-part-2") == ("/d/p-part-1", 2)
    assert [parse_partition(f"/d/p{end}") for end in ("", "-part-", "-part-01")] == [None] * 3


async def test_making_a_topic_looks_at_as_many_names_however_many_there_are(tmp_path, monkeypatch):
    looked = []
    real = partitions._PARTITION

    class Pattern:
        def fullmatch(self, name):
            looked.append(name)
            return real.fullmatch(name)

    monkeypatch.setattr(partitions, "_PARTITION", Pattern())

    async def scenario():
        costs = []
        async with some_topics(tmp_path, mode="memory") as topics:
            await topics.names.recent()
            for number in range(100):
                before = len(looked)
                await topics.get_or_create(f"/default/t{number}", is_reliable=True)
                costs.append(len(looked) - before)
            assert not await topics.names.partitions("/default/none")
        return costs

    costs = await scenario()
    # But for a list that was read anew meanwhile.
    assert sorted(costs)[len(costs) // 2] == costs[1]
    assert costs[1] <= 5
