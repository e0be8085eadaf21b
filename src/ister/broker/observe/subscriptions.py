"""Describes subscriptions, open or stored, as `ister.topic.describe.SubscriptionView`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ister.base.positions import lag_of
from ister.broker.dispatch.dispatcher import Dispatcher
from ister.broker.topics.served_topic import AnySubscription
from ister.subscription.policy import SubscriptionKind
from ister.subscription.store import StoredSubscription
from ister.topic.describe import SubscriptionView

# Names of consumers: of one subscription, and of all subscriptions of a topic.
_CONSUMERS_SHOWN: Final = 100
_CONSUMERS_OF_ALL_SHOWN: Final = 2000


def describe_subscriptions(subscriptions: Iterable[AnySubscription]) -> list[SubscriptionView]:
    """Subscriptions, with a limited number of consumers in total."""
    room, described = _CONSUMERS_OF_ALL_SHOWN, []
    for one in subscriptions:
        described.append(describe_subscription(one, consumers_max=min(room, _CONSUMERS_SHOWN)))
        room -= len(described[-1].consumers)
    return described


def describe_subscription(
    subscription: AnySubscription, *, consumers_max: int = _CONSUMERS_SHOWN
) -> SubscriptionView:
    """A subscription: its cursor, its consumers, and why it is blocked."""
    names = {known.id: name for name, known in subscription.stored.consumers.items()}
    attached = subscription.attached
    view = SubscriptionView(
        name=subscription.name,
        type=subscription.kind.value,
        lag=0,
        in_flight=0,
        waiting=0,
        consumers=[names.get(one, str(one)) for one in attached[:consumers_max]],
        consumers_total=len(attached),
        principals=None if subscription.principals is None else [*subscription.principals],
    )
    if isinstance(subscription, Dispatcher):
        stats = subscription.delivery.stats()
        view.cursor, view.lag, view.in_flight = stats.cursor, subscription.lag, stats.in_flight
        view.waiting = stats.pending + stats.waiting_retry
        view.blocked = stats.blocked
        view.max_unacked_messages = subscription.window
        view.failure_policy = subscription.stored.policy.to_json()
        active = subscription.delivery.active
    else:
        active = subscription.active
    if active is not None and subscription.kind in (
        SubscriptionKind.EXCLUSIVE,
        SubscriptionKind.FAILOVER,
    ):
        view.active = names.get(active, str(active))
    if isinstance(subscription, Dispatcher):
        view.blocked_reason = _why_blocked(
            subscription, view, receiving=len(attached) if view.active is None else 1
        )
    return view


def _why_blocked(subscription: Dispatcher, view: SubscriptionView, *, receiving: int) -> str | None:
    """Why a subscription does not progress; None if it does, or is at the end.

    `receiving` is the number of consumers that receive messages.
    """
    window = subscription.window
    if view.blocked is not None:
        what = "its key" if subscription.kind is SubscriptionKind.KEY_SHARED else "the subscription"
        return (
            f"the message at offset {view.blocked} failed too often and the poison policy is "
            f"block: {what} waits until the message is acknowledged or the policy is changed"
        )
    if not view.lag:
        return None
    if not receiving:
        return "no consumer is connected"
    if (view.in_flight or 0) >= window * receiving:
        return (
            f"its consumers have {view.in_flight} unacknowledged messages; each may have {window}"
        )
    return None


def describe_stored(stored: StoredSubscription, earliest: int, end: int) -> SubscriptionView:
    """A subscription as it is stored, of a topic that has the messages from `earliest` to `end`."""
    return SubscriptionView(
        name=stored.name,
        type=stored.kind.value,
        cursor=stored.cursor,
        lag=lag_of(stored.cursor, earliest=earliest, end=end),
        consumers_total=0,
        max_unacked_messages=stored.window,
        failure_policy=stored.policy.to_json(),
    )
