"""A real S3 server behind a proxy that misbehaves: what is repeated, what is raised, how long."""

import logging
import random
import threading
import time

import pytest

from ister.base.clock import SystemClock
from ister.errors import (
    AlreadyExistsError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.objectstore.opendal_store import open_store
from tests.servers.fault_proxy import Action, FaultProxy
from tests.servers.s3 import BUCKET, moto_server, rclone_server
from tests.support.cases import each

MIB = 1024 * 1024
IO_SECONDS = 0.8
RETRIES = 2
PASSING = [Action.SLOW_DOWN, Action.INTERNAL_ERROR, Action.RESET, Action.LOST_REPLY, Action.HANG]


@pytest.fixture(scope="module", params=["rclone", "moto"])
def any_server(request):
    """Each server in turn, for what they answer differently."""
    start = {"rclone": rclone_server, "moto": moto_server}[request.param]
    with start() as server, FaultProxy(server.port) as proxy:
        yield server, proxy


@pytest.fixture(scope="module")
def rclone():
    """The server that verifies signatures: they hold through the proxy."""
    with rclone_server() as server, FaultProxy(server.port) as proxy:
        yield server, proxy


class Place:
    """A store behind a proxy, and its pauses."""

    def __init__(self, server, proxy):
        self.server = server
        self.proxy = proxy
        self.pauses = []
        self.root = f"s3://{BUCKET}/{random.randbytes(6).hex()}"
        self.store = self.open()
        # For large requests that succeed in the end, however busy the machine is.
        self.patient = self.open(io_timeout_seconds=10.0, call_timeout_seconds=120.0)

    def open(self, root=None, **settings):
        return open_store(
            "s3",
            root or self.root,
            self.server.options(endpoint=self.proxy.endpoint),
            clock=SystemClock(),
            sleep=self.pauses.append,
            **{
                "io_timeout_seconds": IO_SECONDS,
                "call_timeout_seconds": IO_SECONDS * 10,
                "retries": RETRIES,
                **settings,
            },
        )

    def stream(self, key, size=12 * MIB, store=None):
        writer = (store or self.store).open_writer(key, chunk_bytes=5 * MIB, concurrent_parts=2)
        for _ in range(size // MIB):
            writer.write(bytes(MIB))
        writer.close()


def place_of(pair):
    server, proxy = pair
    proxy.clear()
    place = Place(server, proxy)
    place.store.put("there", b"0123456789")
    proxy.clear()
    return place


@pytest.fixture
def place(rclone):
    place = place_of(rclone)
    yield place
    place.proxy.clear()
    place.store.close()
    place.patient.close()


@pytest.fixture
def any_place(any_server):
    place = place_of(any_server)
    yield place
    place.proxy.clear()
    place.store.close()
    place.patient.close()


CALLS = {
    "read": ("GET", lambda store: store.read("there", 0, 10)),
    "stat": ("HEAD", lambda store: store.stat("there")),
    "list": ("GET", lambda store: list(store.list(""))),
    "put": ("PUT", lambda store: store.put("new", b"x")),
    "copy": ("PUT", lambda store: store.copy("there", "copied")),
    "delete": ("DELETE", lambda store: store.delete("there")),
}


@pytest.mark.nightly
@pytest.mark.parametrize("action", PASSING)
@pytest.mark.parametrize("name", CALLS)
def test_call_that_may_be_repeated_survives_one_failure(place, name, action):
    method, call = CALLS[name]
    rule = place.proxy.add(action, method=method)
    call(place.store)
    assert rule.hits == 1
    assert place.proxy.count(method) == 2
    assert len(place.pauses) == 1


@pytest.mark.parametrize("name", CALLS)
def test_storm_ends_in_unavailable_after_the_attempts_allowed(place, name):
    method, call = CALLS[name]
    place.proxy.add(Action.SLOW_DOWN, method=method, count=None)
    with pytest.raises(UnavailableError):
        call(place.store)
    assert place.proxy.count(method) == RETRIES + 1
    assert len(place.pauses) == RETRIES
    assert place.pauses == sorted(place.pauses)


@pytest.mark.parametrize("name", CALLS)
def test_denial_is_raised_at_once(place, name):
    method, call = CALLS[name]
    place.proxy.add(Action.DENIED, method=method, count=None)
    with pytest.raises(PermissionDeniedError):
        call(place.store)
    assert place.proxy.count(method) == 1
    assert place.pauses == []


@pytest.mark.nightly
@each("name", CALLS)
def test_call_to_a_store_that_hangs_ends_at_its_deadline(place, name):
    method, call = CALLS[name]
    place.proxy.add(Action.HANG, method=method, count=None)
    begin = time.monotonic()
    with pytest.raises(UnavailableError):
        call(place.open(call_timeout_seconds=IO_SECONDS, retries=9))
    assert time.monotonic() - begin < 60


def test_listing_that_hangs_does_not_stop_other_threads(place):
    """Goal: the interpreter lock is free while a page is waited for.

    Method: another thread counts meanwhile; opendal's own iterator would let it stand still.
    """

    def count():
        while not stop.wait(0.01):
            ticks.append(1)

    stop, ticks, store = threading.Event(), [], place.open(retries=0)
    place.proxy.add(Action.HANG, method="GET", count=None)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        with pytest.raises(UnavailableError):
            list(store.list(""))
    finally:
        stop.set()
        thread.join()
    assert len(ticks) > 3


def test_missing_object_is_asked_for_once(place):
    with pytest.raises(NotFoundError):
        place.store.read("none", 0, 10)
    with pytest.raises(NotFoundError):
        place.store.stat("none")
    assert (place.proxy.count("GET"), place.proxy.count("HEAD")) == (1, 1)


# -- bodies -------------------------------------------------------------------------------------


@each(("start", "size"), [(0, 10), (2, 6), (5, 100)])
def test_truncated_body_is_read_again(place, start, size):
    place.proxy.add(Action.TRUNCATED, method="GET")
    assert place.store.read("there", start, size) == b"0123456789"[start : start + size]


def test_body_that_stays_truncated_is_unavailable(place):
    place.proxy.add(Action.TRUNCATED, method="GET", count=None)
    with pytest.raises(UnavailableError):
        place.store.read("there", 0, 10)
    assert place.proxy.count("GET") == RETRIES + 1


def test_body_that_never_begins_is_unavailable(place):
    place.proxy.add(Action.NO_BODY, method="GET", count=None)
    with pytest.raises(UnavailableError):
        place.open(retries=0).read("there", 0, 10)


def test_body_that_drips_past_the_deadline_is_unavailable(place):
    # All of it would take 2.5 s.
    place.proxy.add(Action.DRIP, method="GET", seconds=0.25, count=None)
    with pytest.raises(UnavailableError, match=r"came in time|timeout"):
        place.open(call_timeout_seconds=0.3).read("there", 0, 10)


# -- writes whose answer is lost ----------------------------------------------------------------


def test_conditional_create_whose_answer_was_lost_is_not_repeated(any_place):
    any_place.proxy.add(Action.LOST_REPLY, method="PUT")
    with pytest.raises(UnavailableError):
        any_place.store.put("lock", b"mine", if_absent=True)
    assert any_place.proxy.count("PUT") == 1
    assert any_place.store.read("lock", 0, 4) == b"mine"


def test_existing_object_is_no_reason_to_ask_again(any_place):
    store = any_place.store
    if not store.probe().conditional_create:
        with pytest.raises(UnsupportedOperationError):
            store.put("there", b"x", if_absent=True)
        return
    any_place.proxy.clear()
    with pytest.raises(AlreadyExistsError):
        store.put("there", b"x", if_absent=True)
    assert any_place.proxy.count("PUT") == 1


def test_lost_answers_do_not_fool_the_probe(any_place):
    expected = any_place.open().probe()
    any_place.proxy.clear()
    any_place.proxy.add(Action.LOST_REPLY, method="PUT", skip=1)
    any_place.proxy.add(Action.LOST_REPLY, method="PUT", skip=1)
    assert any_place.open().probe() == expected
    assert [info.key for info in any_place.store.list("")] == ["there"]


def test_probe_says_what_is_missing(any_place, caplog):
    caplog.set_level(logging.INFO, logger="ister.objectstore")
    capabilities = any_place.store.probe()
    records = [record for record in caplog.records if record.name == "ister.objectstore"]
    if capabilities.conditional_create:
        assert records == []
        return
    (record,) = records
    assert record.levelname == "INFO"
    assert (record.missing, record.location) == ("conditional create", any_place.root)
    any_place.store.probe()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("action", [Action.SLOW_DOWN, Action.DENIED])
def test_probe_of_a_store_that_cannot_be_used_raises(place, action):
    place.proxy.add(action, method="PUT", count=None)
    with pytest.raises(UnavailableError if action is Action.SLOW_DOWN else PermissionDeniedError):
        place.store.probe()


# -- streams ------------------------------------------------------------------------------------


@pytest.mark.nightly
@each("action", PASSING)
@each("path", ["[?]uploads", "partNumber=1", "partNumber=3"])
def test_request_of_a_stream_that_fails_once_is_repeated(place, path, action):
    rule = place.proxy.add(action, path=path)
    place.stream("big", store=place.patient)
    assert rule.hits == 1
    assert place.store.stat("big").size == 12 * MIB


@each("action", [Action.SLOW_DOWN, Action.INTERNAL_ERROR, Action.RESET, Action.OK_WITH_ERROR])
def test_complete_that_fails_once_is_repeated(place, action):
    rule = place.proxy.add(action, method="POST", path="uploadId=")
    place.stream("big", store=place.patient)
    assert rule.hits == 1
    assert place.store.stat("big").size == 12 * MIB


def test_complete_whose_answer_was_lost_is_done_or_unknown_and_never_a_half(any_place):
    any_place.proxy.add(Action.LOST_REPLY, method="POST", path="uploadId=")
    if any_place.server.name == "moto":
        # moto takes the second Complete as well
        any_place.stream("big", store=any_place.patient)
    else:
        with pytest.raises(UnavailableError):
            any_place.stream("big", store=any_place.patient)
    assert any_place.store.stat("big").size == 12 * MIB


def test_complete_whose_answers_are_all_lost_is_unknown(any_place):
    any_place.proxy.add(Action.LOST_REPLY, method="POST", path="uploadId=", count=None)
    with pytest.raises(UnavailableError):
        any_place.stream("big")
    assert any_place.store.stat("big").size == 12 * MIB


@each("action", [Action.SLOW_DOWN, Action.HANG, Action.OK_WITH_ERROR])
def test_complete_that_keeps_failing_leaves_no_object(place, action):
    place.proxy.add(action, method="POST", path="uploadId=", count=None)
    begin = time.monotonic()
    with pytest.raises(UnavailableError):
        place.stream("big")
    assert time.monotonic() - begin < 60
    with pytest.raises(NotFoundError):
        place.store.stat("big")


def test_part_that_hangs_for_good_ends_the_stream(place):
    place.proxy.add(Action.HANG, method="PUT", path="partNumber=", count=None)
    begin = time.monotonic()
    with pytest.raises(UnavailableError):
        place.stream("big", 30 * MIB, place.open(retries=1))
    assert time.monotonic() - begin < 60
    with pytest.raises(NotFoundError):
        place.store.stat("big")


def test_writer_that_failed_says_so_again_and_completes_nothing(place):
    place.proxy.add(Action.DENIED, method="PUT", path="partNumber=", count=None)
    writer = place.store.open_writer("big", chunk_bytes=5 * MIB, concurrent_parts=1)

    def write_it():
        for _ in range(30):
            writer.write(bytes(MIB))
        writer.close()

    with pytest.raises(PermissionDeniedError):
        write_it()
    for again in (lambda: writer.write(b"x"), writer.close):
        with pytest.raises(PermissionDeniedError):
            again()
    writer.abort()
    assert place.proxy.count("POST", "uploadId=") == 0
    assert place.proxy.count("PUT", "partNumber=") <= 2


def test_stream_holds_no_more_than_its_parts_in_flight(place):
    """Goal: writes block behind a slow store. Method: parts that hang; how much was taken."""
    place.proxy.add(Action.HANG, method="PUT", path="partNumber=", count=None)
    store = place.open(retries=0)
    writer = store.open_writer("big", chunk_bytes=5 * MIB, concurrent_parts=2)
    taken = 0

    def write_on():
        nonlocal taken
        for _ in range(100):
            writer.write(bytes(MIB))
            taken += 1

    with pytest.raises(UnavailableError):
        write_on()
    writer.abort()
    assert taken * MIB <= 5 * MIB * (2 + 2)


def test_wrong_secret_is_a_denial_that_does_not_repeat_it(place):
    options = place.server.options(endpoint=place.proxy.endpoint)
    options["secret_key"] = "CANARYSECRET"
    store = open_store("s3", place.root, options, clock=SystemClock())
    for call in (lambda: store.put("a", b"x"), lambda: store.stat("there"), store.probe):
        with pytest.raises(PermissionDeniedError) as raised:
            call()
        assert "CANARY" not in f"{raised.value} {raised.value.__cause__}"


@pytest.mark.nightly
@pytest.mark.parametrize("any_server", ["moto"], indirect=True)  # rclone has one page for all
def test_interrupted_listing_goes_on_behind_what_it_has(any_server):
    """Goal: a long listing survives failures. Method: a page that fails between two others."""
    place = place_of(any_server)
    names = [f"many/{number:04d}" for number in range(1010)]
    direct = open_store("s3", place.root, place.server.options(), clock=SystemClock())
    for name in names:
        direct.put(name, b"")
    place.proxy.add(Action.SLOW_DOWN, method="GET", skip=1)
    store = place.open(io_timeout_seconds=5.0, call_timeout_seconds=20.0)
    assert [info.key for info in store.list("many/")] == names
    pages = [request.path for request in place.proxy.requests if request.method == "GET"]
    assert len(pages) == 3
    assert "start-after" in pages[2]
