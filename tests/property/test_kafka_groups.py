"""Consumer groups under any order of events: every invariant after each, and no answer lost.

The members behave as Kafka's clients do: join, come again with the id that they were given, sync,
send heartbeats, and may stop at any point.
"""

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kio.schema.errors import ErrorCode

from ister.broker.kafka.groups import Group, GroupState, Joined, Synced, Wish
from tests.support.scale import scaled

SESSION, REBALANCE = 10.0, 30.0
NONE = ErrorCode.none


def a_wish(instance=None, *, protocols=("range",), metadata=b"m"):
    return Wish(
        client_id="c",
        host="h",
        session_seconds=SESSION,
        rebalance_seconds=REBALANCE,
        protocol_type="consumer",
        protocols=dict.fromkeys(protocols, metadata),
        instance=instance,
    )


class _Client:
    """A member as its client sees it."""

    def __init__(self, instance):
        self.instance = instance
        self.member = ""
        self.generation = -1
        self.leads = ()
        self.waits = None
        self.has_assignment = False


class Groups(RuleBasedStateMachine):
    """See the module."""

    def __init__(self):
        super().__init__()
        self.group = Group("g", epoch=1)
        self.now = 0.0
        self.tokens = count()
        self.ids = count()
        self.open = {}  # tokens without an answer, and whose they are
        self.clients = []
        self.committed = 0  # the generation that committed last

    def token(self, client):
        made = next(self.tokens)
        self.open[made] = client
        client.waits = made
        return made

    def take(self):
        for token, answer in self.group.take_answers():
            client = self.open.pop(token)  # each once
            if client.waits != token:
                continue  # it has asked again since
            client.waits = None
            if answer.code is ErrorCode.member_id_required:
                client.member = answer.member
            elif answer.code in (ErrorCode.unknown_member_id, ErrorCode.fenced_instance_id):
                client.member, client.generation, client.has_assignment = "", -1, False
            elif isinstance(answer, Joined) and answer.code is NONE:
                assert answer.generation >= client.generation
                client.member, client.generation = answer.member, answer.generation
                client.leads = tuple(one[0] for one in answer.members)
                client.has_assignment = answer.skips_assignment
                assert bool(answer.members) <= (answer.leader == answer.member)
            elif isinstance(answer, Synced):
                client.has_assignment = answer.code is NONE
                if answer.code is NONE and answer.assignment:
                    assert answer.assignment == f"{client.generation}".encode()

    def pick(self, number, *, waiting=False):
        free = [one for one in self.clients if waiting or one.waits is None]
        return free[number % len(free)] if free else None

    @precondition(lambda self: len(self.clients) < 5)
    @rule(instance=st.sampled_from((None, None, "i1", "i2")))
    def arrive(self, instance):
        self.clients.append(_Client(instance))

    @rule(
        number=st.integers(0, 9), needs_id=st.booleans(), can_skip=st.booleans(), new=st.booleans()
    )
    def join(self, number, needs_id, can_skip, new):
        client = self.pick(number, waiting=new)
        if client is None:
            return
        wish = a_wish(client.instance, metadata=b"new" if new else b"m")
        self.group.join(
            self.now,
            self.token(client),
            client.member,
            wish,
            new_id=f"m{next(self.ids)}",
            needs_id=needs_id,
            can_skip=can_skip,
        )
        self.take()

    @rule(number=st.integers(0, 9), stale=st.booleans())
    def sync(self, number, stale):
        client = self.pick(number)
        if client is None or client.generation < 0:
            return
        generation = client.generation - (1 if stale else 0)
        assignments = {one: f"{client.generation}".encode() for one in client.leads}
        self.group.sync(
            self.now,
            self.token(client),
            client.member,
            client.instance,
            generation,
            assignments=assignments,
        )
        self.take()

    @rule(number=st.integers(0, 9))
    def beat(self, number):
        client = self.pick(number)
        if client is not None:
            self.group.heartbeat(self.now, client.member, client.instance, client.generation)
            self.take()

    @rule(number=st.integers(0, 9), delta=st.sampled_from((-(1 << 16), -1, 0, 1)))
    def commit(self, number, delta):
        client = self.pick(number, waiting=True)
        if client is None:
            return
        generation = client.generation + delta
        code = self.group.check_commit(self.now, client.member, client.instance, generation)
        if code is NONE and generation >= 0:
            # No zombie: the generation is the newest, and only grows.
            assert generation == self.group.generation >= self.committed
            assert client.member in self.group.members
            self.committed = generation
        elif code is NONE:
            assert not self.group.members

    @rule(number=st.integers(0, 9), by_instance=st.booleans())
    def leave(self, number, by_instance):
        client = self.pick(number, waiting=True)
        if client is None:
            return
        member = "" if by_instance and client.instance is not None else client.member
        self.group.leave(self.now, member, client.instance)
        self.take()

    @rule(number=st.integers(0, 9))
    def crash(self, number):
        client = self.pick(number, waiting=True)
        if client is not None:
            self.clients.remove(client)
            client.waits = None

    @rule(seconds=st.sampled_from((0.1, 0.6, 5.0, 11.0, 31.0)))
    def wait(self, seconds):
        self.now += seconds
        self.group.tick(self.now)
        self.take()

    @invariant()
    def holds(self):
        self.group.validate_state()
        waiting = {
            token
            for one in self.group.members.values()
            for token in (one.joining, one.syncing)
            if token is not None
        }
        assert waiting == set(self.open), "an answer was lost"
        at = self.group.next_at()
        assert (at is None) == (not self.group.members and not self.group._pending)

    def teardown(self):
        # Whatever has happened, clients that go on have a stable group in the end.
        for _ in range(2):
            self.now += 100
            self.group.tick(self.now)
            self.take()
            self.now += 100
            self.group.tick(self.now)
            self.take()
        assert not self.open
        client = _Client(None)
        for needs_id in (True, True):
            self.group.join(
                self.now,
                self.token(client),
                client.member,
                a_wish(),
                new_id=f"m{next(self.ids)}",
                needs_id=needs_id,
            )
            self.take()
        self.now += 50
        self.group.tick(self.now)
        self.take()
        assert client.generation == self.group.generation
        self.group.sync(
            self.now, self.token(client), client.member, None, client.generation, assignments={}
        )
        self.take()
        assert client.has_assignment
        assert self.group.state is GroupState.STABLE


Groups.TestCase.settings = settings(
    max_examples=scaled(100, 5000), stateful_step_count=40, deadline=None, print_blob=True
)
TestGroups = Groups.TestCase


def test_generations_of_an_older_coordinator_are_lower():
    old, new = Group("g", epoch=1), Group("g", epoch=2)
    old.join(0.0, "t", "", a_wish(), new_id="m", needs_id=False)
    for at in range(1, 50):
        old.tick(100.0 * at)
        old.join(100.0 * at, "t", "", a_wish(), new_id=f"m{at}", needs_id=False)
    assert old.generation > 1 << 16
    assert old.generation < new.generation
    assert new.check_commit(0.0, "m", None, old.generation) is ErrorCode.unknown_member_id
    new.join(0.0, "t", "", a_wish(), new_id="m", needs_id=False)
    assert new.check_commit(0.0, "m", None, old.generation) is ErrorCode.illegal_generation
