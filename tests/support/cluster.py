"""Brokers without a server: each one's log and its part of the cluster, on stores in memory."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ister.base.model import TopicName
from ister.broker.cluster.cluster import Cluster
from ister.bucket.members import Load, Member, MemberState, encode_member, member_key
from ister.config import ClusterConfig, RebalanceConfig, Strategy
from ister.errors import CommitUnknownError
from ister.metadata.base import Put
from ister.topic.log import Log
from tests.support.stores import Site

TTL = 15.0
ROOT = "/danube"


def a_member(node: str, **more) -> Member:
    """A broker that is up and has nothing to do."""
    return Member(
        **{
            "node": node,
            "broker_url": f"http://{node}:1",
            "connect_url": f"http://{node}:1",
            "flight_url": f"grpc://{node}:2",
            **more,
        }
    )


def enter(log: Log, address: str) -> None:
    """Makes a log known as a broker whose Flight is at an address."""
    membership = log.stores.membership
    member = a_member(membership.node, flight_url=f"grpc://{address}")
    key = member_key(log.stores.storage.metadata.root_prefix, member.node)
    log.stores.metadata.transact([], [Put(key, encode_member(member), membership.lease)])


@dataclass(eq=False)
class NodeBroker:
    """One broker: its log, and its part of the cluster."""

    log: Log
    cluster: Cluster

    @property
    def node(self) -> str:
        return self.cluster.own.node

    def publish(self, state: MemberState | None = None, load: Load | None = None) -> None:
        self.cluster.members.publish(state=state, load=load)

    def route(self, topic: str, *, creates: bool = False, is_unlogged: bool = False) -> str:
        """The node that a topic's clients are sent to."""
        found = self.cluster.route(
            TopicName.parse(topic), is_unlogged=lambda: is_unlogged, creates=creates
        )
        return found.node

    def create(self, topic: str, **more) -> None:
        """Creates a topic here, whatever the others think."""
        self.log.topic(topic, create=True, **more)

    def round(self, *, has_changed: bool = False) -> bool:
        self.publish()
        return self.cluster.lead(has_changed=has_changed)


class BrokerSite(Site):
    """Brokers that share a bucket and a metadata store."""

    def __init__(self) -> None:
        super().__init__()
        self.brokers: dict[str, NodeBroker] = {}

    def start(
        self,
        name: str,
        *,
        state: MemberState = MemberState.ACTIVE,
        strategy: Strategy = Strategy.FAIR,
        **rebalance,
    ) -> NodeBroker:
        """A broker that has just written its entry."""
        log = self.open(name, storage={"metadata": {"lease_ttl_seconds": int(TTL)}})
        config = ClusterConfig(strategy=strategy, rebalance=RebalanceConfig(**rebalance))
        member = a_member(log.stores.membership.node, state=state)
        cluster = Cluster(member, log.stores, config=config, clock=self.clock)
        cluster.members.publish()
        self.brokers[name] = broker = NodeBroker(log, cluster)
        self.expire_lists()
        return broker

    def crash(self, name: str) -> None:
        """Ends a broker's process, and its lease; the others keep theirs."""
        broker = self.brokers.pop(name)
        self.kill(broker.log)
        self.pass_time(TTL + 1)

    def end_lease(self, broker: NodeBroker) -> None:
        """A broker sleeps for longer than its lease, and the others do not."""
        broker.log.stores.membership.lease.revoke()
        self.expire_lists()

    def replace_process(self, broker: NodeBroker) -> None:
        """A copy of a broker's directory takes its node."""
        key = f"/danube/cluster/nodes/{broker.node}/process"
        value = self.metadata.get(key).value.replace(b'"instance":"', b'"instance":"x')
        self.metadata.put(key, value)

    def pass_time(self, seconds: float) -> None:
        """Time passes, in steps in which every live broker renews its lease."""
        while seconds > 0:
            step = min(seconds, TTL / 3)
            self.clock.advance(step)
            seconds -= step
            for broker in self.brokers.values():
                broker.log.stores.membership.renew()
                broker.publish()
        self.expire_lists()

    def expire_lists(self) -> None:
        for broker in self.brokers.values():
            broker.cluster.members.expire()

    def assignments(self) -> dict[str, str]:
        """The node of each assigned topic, by topic."""
        prefix = f"{ROOT}/cluster/assignments"
        decoded = self.brokers[min(self.brokers)].cluster.assignments.all()
        assert len(decoded) == len(self.metadata.range(f"{prefix}/"))
        return {topic: known.node for topic, (known, _) in decoded.items()}

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """Counts the calls of the metadata store, by kind."""
        calls: Counter[str] = Counter()
        before = self.metadata.before

        def count(kind: str, key: str) -> None:
            calls[kind] += 1
            before(kind, key)

        self.metadata.before = count
        try:
            yield calls
        finally:
            self.metadata.before = before

    def lose_answer(self, kind: str, key: str) -> None:
        """The answer to the next call of a kind with a key is lost."""

        def lose(found: str, at: str) -> None:
            if (found, at) == (kind, key):
                self.metadata.after = lambda kind, key: None
                raise CommitUnknownError("lost")

        self.metadata.after = lose

    def before_next(self, kind: str, key: str, act: Callable[[], object]) -> None:
        """Has something happen before the next call of a kind with a key."""

        def before(found: str, at: str) -> None:
            if (found, at) == (kind, key):
                self.metadata.before = lambda kind, key: None
                act()

        self.metadata.before = before
