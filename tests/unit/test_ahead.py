"""A generator that is one item ahead of its consumer."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ister.ahead import one_ahead


class Numbers:
    """Three numbers, and what has become of the generator that makes them."""

    def __init__(self, *, fails_at=None, waits_at=None):
        self.fails_at = fails_at
        self.waits_at = waits_at
        self.made = threading.Semaphore(0)
        self.may_go_on = threading.Event()
        self.is_closed = False

    def make(self):
        try:
            for number in range(1, 4):
                if number == self.fails_at:
                    raise ValueError(number)
                self.made.release()
                if number == self.waits_at:
                    self.may_go_on.wait()
                yield number
        finally:
            self.is_closed = True


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_items_come_in_order_and_the_generator_is_closed(pool):
    numbers = Numbers()
    assert list(one_ahead(numbers.make(), pool)) == [1, 2, 3]
    assert numbers.is_closed


def test_one_item_is_made_while_the_consumer_is_busy_and_no_more(pool):
    numbers = Numbers()
    items = one_ahead(numbers.make(), pool)
    assert next(items) == 1
    assert numbers.made.acquire(timeout=60)
    assert numbers.made.acquire(timeout=60)  # the second, which nobody has asked for
    pool.submit(int).result()  # a third would have come before this
    assert not numbers.made.acquire(blocking=False)
    items.close()


def test_error_comes_after_the_items_before_it(pool):
    numbers = Numbers(fails_at=3)
    items = one_ahead(numbers.make(), pool)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ValueError, match="3"):
        next(items)
    assert numbers.is_closed


def test_generator_that_runs_is_closed_when_it_has_made_its_item(pool):
    numbers = Numbers(waits_at=2)
    items = one_ahead(numbers.make(), pool)
    assert next(items) == 1
    assert numbers.made.acquire(timeout=60)
    assert numbers.made.acquire(timeout=60)
    threading.Timer(0.05, numbers.may_go_on.set).start()
    items.close()
    assert numbers.is_closed
