"""The memory for delivery: who may have how much, and who gives back."""

from ister.broker.dispatch import memory_budget as module
from ister.broker.dispatch.memory_budget import Budget, machine_memory_bytes
from tests.support.cases import each


class Holder:
    """Somebody with a share, who gives back all but what it cannot."""

    def __init__(self, budget, *, stuck=0):
        self.share = budget.share(self.shed)
        self.stuck = stuck
        self.shed_count = 0

    def shed(self):
        self.shed_count += 1
        self.share.set(min(self.share.used, self.stuck))


def test_the_largest_gives_back_when_the_budget_is_used_up():
    budget = Budget(1000)
    small, large, other = Holder(budget), Holder(budget), Holder(budget)
    small.share.set(100)
    large.share.set(600)
    other.share.set(250)
    assert (small.shed_count, large.shed_count, other.shed_count) == (0, 0, 0)
    small.share.set(200)
    assert (small.shed_count, large.shed_count, other.shed_count) == (0, 1, 0)
    assert budget.used == 450


def test_whoever_takes_nothing_gives_back_before_the_largest():
    budget = Budget(1000)
    idle, large = Holder(budget), Holder(budget)
    idle.share.is_idle = True
    idle.share.set(300)
    large.share.set(750)
    assert (idle.shed_count, large.shed_count) == (1, 0)


def test_the_allowance_is_an_equal_part_once_half_is_used():
    budget = Budget(1000)
    holders = [Holder(budget) for _ in range(10)]
    for holder in holders[:4]:
        holder.share.set(100)
    assert budget.allowance == 1000
    for holder in holders[4:]:
        holder.share.set(50)
    assert budget.allowance == 50
    for holder in holders:
        holder.share.close()
        holder.share.set(70)
    assert budget.used == 0
    assert budget.allowance == 1000


def test_what_cannot_be_given_back_goes_over_and_ends():
    budget = Budget(100)
    stuck = [Holder(budget, stuck=80) for _ in range(5)]
    for holder in stuck:
        holder.share.set(90)
    assert budget.used <= 5 * 80 + 10
    assert all(holder.share.used >= 80 for holder in stuck)


def test_nobody_is_asked_again_and_again_for_what_cannot_be_given_back():
    budget = Budget(1000)
    stuck = [Holder(budget, stuck=90) for _ in range(20)]
    for holder in stuck:
        holder.share.set(90, fixed=90)
    assert budget.used == 1800
    taker = Holder(budget)
    for number in range(1000):
        taker.share.set(10 + number % 2)
    assert taker.shed_count == 0
    assert all(holder.shed_count == 0 for holder in stuck)
    taker.share.set(300)
    assert taker.shed_count == 1


@each(
    ("limits", "expected"),
    [
        ({}, 8000),
        ({"memory.max": "max"}, 8000),
        ({"memory.max": "3000"}, 3000),
        ({"memory.max": "9000"}, 8000),
        ({"memory/memory.limit_in_bytes": "4000"}, 4000),
        ({"a/b/memory.max": "max", "a/memory.max": "2000"}, 2000),
    ],
)
def test_the_machines_memory_is_what_the_control_group_leaves(
    limits, expected, tmp_path, monkeypatch
):
    for name, text in limits.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    monkeypatch.setattr(module, "_CGROUP", str(tmp_path))
    monkeypatch.setattr(module, "_own_groups", lambda: [("", "/a/b")])
    monkeypatch.setattr(module.os, "sysconf", {"SC_PHYS_PAGES": 8, "SC_PAGE_SIZE": 1000}.get)
    assert machine_memory_bytes() == expected
