"""When a cursor is written: by time, by distance, and not without a change."""

import pytest

from ister.errors import InvalidRequestError
from ister.subscription.progress import ProgressPlan
from tests.support.cases import each


@pytest.fixture
def plan():
    return ProgressPlan(5.0, 100, cursor=10)


def test_nothing_is_due_without_a_change(plan):
    plan.update(10, 0.0)
    assert plan.deadline() is None
    assert not plan.is_due(1e9)
    assert not plan.is_dirty


def test_change_is_due_after_the_interval(plan):
    plan.update(11, 3.0)
    assert plan.is_dirty
    assert plan.deadline() == 8.0
    assert not plan.is_due(7.9)
    assert plan.is_due(8.0)


def test_later_changes_do_not_put_it_off(plan):
    plan.update(11, 3.0)
    plan.update(12, 7.0)
    assert plan.deadline() == 8.0


def test_long_way_is_due_at_once(plan):
    plan.update(11, 3.0)
    plan.update(110, 4.0)
    assert plan.is_due(4.0)


def test_long_way_back_is_due_at_once():
    plan = ProgressPlan(5.0, 100, cursor=1000)
    plan.update(3, 4.0)
    assert plan.is_due(4.0)


def test_what_was_written_is_not_due_again(plan):
    plan.update(500, 3.0)
    plan.written(500, 4.0)
    assert plan.deadline() is None
    plan.update(501, 6.0)
    assert plan.deadline() == 11.0


def test_what_happened_during_a_write_is_still_to_be_written(plan):
    plan.update(200, 3.0, version=1)
    plan.update(201, 3.5, version=2)
    plan.written(200, 4.0, version=1)
    assert plan.deadline() == 9.0
    plan.written(201, 9.0, version=1)
    assert plan.deadline() == 14.0
    plan.written(201, 14.0, version=2)
    assert plan.deadline() is None


def test_saved_state_counts_as_a_change(plan):
    plan.update(10, 3.0, version=1)
    assert plan.deadline() == 8.0
    plan.written(10, 8.0)
    assert plan.deadline() is None


def test_first_cursor_is_due_when_the_store_has_none():
    plan = ProgressPlan(5.0, 100)
    plan.update(0, 1.0)
    assert plan.is_due(1.0)


def test_failed_write_is_tried_again_after_a_while(plan):
    plan.update(500, 3.0)
    plan.failed(3.0, 2.0)
    assert not plan.is_due(4.9)
    assert plan.is_due(5.0)
    plan.update(900, 5.5)
    plan.written(900, 6.0)
    plan.update(1900, 6.0)
    assert plan.is_due(6.0)


@each("settings", [(-1, 5), (float("nan"), 5), (1, 0)])
def test_senseless_settings_are_refused(settings):
    with pytest.raises(InvalidRequestError):
        ProgressPlan(*settings)
