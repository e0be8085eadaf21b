"""Subscriptions on the command line, as far as no broker is needed."""

from types import SimpleNamespace

import pytest

from ister.cli.subscriptions import _one_of
from ister.errors import NotFoundError
from ister.subscription.policy import FailurePolicy

T = "/default/t"


class FewShown:
    """A client of a topic that has more subscriptions than a view of it shows."""

    @property
    def admin(self):
        return self

    def show_topic(self, topic):
        return {"topic": topic, "partitions": [], "subscriptions": [{"name": "shown"}]}

    def partitions(self, topic):
        return [topic]

    def subscriptions(self, topic):
        return ["shown", "too-many"]

    def describe_topic(self, topic):
        fields = {
            "kind": "shared",
            "cursor": 7,
            "lag": 3,
            "in_flight": 1,
            "waiting": 0,
            "blocked": None,
            "consumers": ("c",),
            "active": None,
            "max_unacked_messages": 10,
            "principals": None,
        }
        names = ("shown", "too-many")
        return SimpleNamespace(
            subscriptions=tuple(SimpleNamespace(subscription=name, **fields) for name in names)
        )

    def failure_policy(self, topic, subscription):
        return FailurePolicy()


def test_one_that_a_view_does_not_show_is_found_all_the_same():
    client = FewShown()
    assert _one_of(client, T, "shown") == [{"topic": T, "name": "shown"}]
    [found] = _one_of(client, T, "too-many")
    assert (found["name"], found["cursor"], found["consumers"]) == ("too-many", 7, ["c"])
    assert found["failure_policy"] == FailurePolicy().to_json()
    with pytest.raises(NotFoundError):
        _one_of(client, T, "none")
