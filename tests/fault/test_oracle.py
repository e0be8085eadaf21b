"""The oracle of the fault tests can fail: made-up histories and logs that are wrong in one way."""

import pytest

from tests.support.oracle import History, identify, payload_of

TOPIC = "/t/a"
SYNCED = frozenset({"synced"})


def a_history(*, acked: int = 3, level: str = "synced") -> History:
    """Messages p.0, p.1 … sent one after the other, each acknowledged before the next."""
    history = History()
    for number in range(acked):
        history.send(TOPIC, f"p.{number}")
        history.ack(TOPIC, f"p.{number}", number, level)
    return history


def a_log(*ids: str, first: int = 0) -> list[tuple[int, bytes]]:
    """A log that holds these messages from `first` on."""
    return [(first + at, payload_of(message_id)) for at, message_id in enumerate(ids)]


def judge(history: History, entries: list[tuple[int, bytes]], **options) -> dict[str, int]:
    return history.check(
        TOPIC, entries, survives=options.pop("survives", SYNCED), **options
    ).kinds()


def test_log_with_every_acknowledged_message_is_clean():
    report = a_history().check(TOPIC, a_log("p.0", "p.1", "p.2"), survives=SYNCED)
    assert report.is_clean
    assert (report.read, report.acked) == (3, 3)


@pytest.mark.parametrize(
    ("ids", "kinds"),
    [
        pytest.param(["p.0", "p.1"], {"lost": 1}, id="the last one is gone"),
        pytest.param([], {"lost": 3}, id="everything is gone"),
        pytest.param(["p.0", "p.2"], {"changed": 1, "lost": 1}, id="one moved up"),
        pytest.param(
            ["p.0", "p.2", "p.1"], {"changed": 2, "reorder": 2}, id="two changed their places"
        ),
        pytest.param(["p.0", "p.1", "p.2", "p.1"], {"duplicate": 1}, id="one twice"),
        pytest.param(["p.0", "p.1", "p.2", "q.0"], {"phantom": 1}, id="one that nobody sent"),
    ],
)
def test_wrong_log_is_named(ids, kinds):
    assert judge(a_history(), a_log(*ids)) == kinds


def test_hole_is_named():
    entries = a_log("p.0") + a_log("p.1", first=2)
    history = History()
    for message_id in ("p.0", "p.1"):
        history.send(TOPIC, message_id)
    assert judge(history, entries) == {"hole": 1}


def test_offset_that_is_there_twice_is_named():
    assert judge(a_history(), a_log("p.0", "p.1", "p.2") + a_log("p.2", first=2)) == {
        "duplicate": 1
    }


def test_offsets_that_go_back_are_named():
    history = History()
    for message_id in ("p.0", "p.1"):
        history.send(TOPIC, message_id, sender=message_id)
    entries = a_log("p.0", first=1) + a_log("p.1", first=0)
    assert judge(history, entries) == {"hole": 1, "reorder": 1}


def test_offset_acknowledged_to_two_messages_is_named():
    history = a_history(acked=1)
    history.send(TOPIC, "q.0")
    history.ack(TOPIC, "q.0", 0, "synced")
    assert judge(history, a_log("q.0")) == {"changed": 1}
    assert judge(history, a_log("p.0"))["changed"] >= 1


def test_message_told_two_offsets_is_named():
    history = a_history(acked=2)
    history.ack(TOPIC, "p.1", 5, "synced")
    assert "duplicate" in judge(history, a_log("p.0", "p.1"))


def test_message_before_one_acknowledged_earlier_is_named():
    """Two senders: the second one's message was sent after the first one's was acknowledged."""
    history = History()
    history.send(TOPIC, "p.0")
    history.ack(TOPIC, "p.0", 1, "synced")
    history.send(TOPIC, "q.0")
    assert judge(history, a_log("q.0", "p.0")) == {"reorder": 1}


def test_concurrent_messages_may_stand_in_any_order():
    history = History()
    for message_id in ("p.0", "q.0"):
        history.send(TOPIC, message_id)
    assert judge(history, a_log("q.0", "p.0")) == {}
    assert judge(History(), []) == {}


def test_unacknowledged_messages_of_one_sender_keep_their_order():
    history = History()
    for message_id in ("p.0", "p.1"):
        history.send(TOPIC, message_id)
    assert judge(history, a_log("p.1", "p.0")) == {"reorder": 1}


def test_unknown_message_may_be_there_or_not():
    for ids in (["p.0"], ["p.0", "p.1"]):
        history = a_history(acked=1)
        history.send(TOPIC, "p.1")
        history.unknown(TOPIC, "p.1")
        assert judge(history, a_log(*ids)) == {}


def test_unknown_message_that_was_read_has_to_stay():
    history = a_history(acked=1)
    history.send(TOPIC, "p.1")
    assert judge(history, a_log("p.0", "p.1")) == {}
    assert judge(history, a_log("p.0")) == {"lost": 1}


def test_unknown_message_that_was_not_read_may_lose_its_offset():
    history = a_history(acked=1)
    for message_id in ("p.1", "q.0"):
        history.send(TOPIC, message_id)
    assert judge(history, a_log("p.0")) == {}
    history.ack(TOPIC, "q.0", 1, "synced")
    assert judge(history, a_log("p.0", "q.0")) == {}
    assert judge(history, a_log("p.0", "p.1")) == {"changed": 1}


def test_refused_message_must_not_appear():
    history = a_history(acked=1)
    history.send(TOPIC, "p.1")
    history.error(TOPIC, "p.1")
    assert judge(history, a_log("p.0")) == {}
    assert judge(history, a_log("p.0", "p.1")) == {"refused": 1}


def test_level_decides_what_has_to_survive():
    lost = a_log("p.0", "p.1")
    assert judge(a_history(level="written"), lost, survives=frozenset({"synced"})) == {}
    assert judge(a_history(level="written"), lost, survives=frozenset({"written", "synced"})) == {
        "lost": 1
    }


def test_trimmed_messages_are_not_lost():
    history = a_history()
    history.trim(TOPIC, 2)
    assert judge(history, a_log("p.2", first=2), first=2) == {}
    assert judge(history, a_log("p.1", "p.2", first=1), first=1) == {}


def test_more_trimmed_than_asked_for_is_a_hole():
    history = a_history()
    history.trim(TOPIC, 1)
    assert judge(history, a_log("p.2", first=2), first=2) == {"hole": 1}


def test_damaged_payload_is_a_phantom():
    payload = payload_of("p.0#64")
    assert identify(payload) == "p.0#64"
    assert len(payload) == len("p.0#64|") + 64
    for damaged in (payload[:-1], payload[:-4], payload[:-1] + b"\0", payload + b"\0", b""):
        assert identify(damaged) is None, damaged
    assert judge(History(), [(0, payload[:-4])]) == {"phantom": 1}


def test_sending_an_id_twice_is_an_error_of_the_test():
    history = a_history(acked=1)
    with pytest.raises(ValueError, match=r"p\.0 was sent before"):
        history.send(TOPIC, "p.0")
    with pytest.raises(KeyError):
        history.unknown(TOPIC, "p.7")


def test_report_shows_a_few_findings_and_counts_the_rest():
    report = a_history(acked=20).check(TOPIC, [], survives=SYNCED)
    assert report.kinds() == {"lost": 20}
    assert "/t/a@0 p.0, acknowledged" in str(report)
    assert "15 more" in str(report)
