"""Lines of the audit log: one event each, whatever callers say, and not too many."""

import json
import logging

import pytest

from ister.broker.security.audit import AuditLog, Outcome
from ister.broker.security.principal import Principal, PrincipalKind
from ister.errors import ConfigError
from tests.support.cases import each
from tests.support.clock import ManualClock

ALICE = Principal(name="alice", kind=PrincipalKind.USER, via="jwt")


class Written:
    def __init__(self, directory, **more):
        self.path = directory / "audit.jsonl"
        self.clock = ManualClock()
        self.log = AuditLog(str(self.path), clock=self.clock, **more)

    def lines(self):
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def written(tmp_path):
    written = Written(tmp_path)
    yield written
    written.log.close()


def deny(log, resource="/default/orders", **more):
    log.record(Outcome.DENIED, action="send", principal=ALICE, resource=resource, **more)


def test_line_says_who_did_what(written):
    written.log.record(
        Outcome.ALLOWED,
        action="danube_admin.TopicAdmin/DeleteTopic",
        principal=ALICE,
        resource="/default/orders",
        peer="ipv4:127.0.0.1:5000",
        detail="more",
    )
    assert written.lines() == [
        {
            "time": "2023-11-14T22:13:20.000Z",
            "action": "danube_admin.TopicAdmin/DeleteTopic",
            "outcome": "allowed",
            "principal": "user:alice",
            "via": "jwt",
            "resource": "/default/orders",
            "peer": "ipv4:127.0.0.1:5000",
            "detail": "more",
        }
    ]


@each(
    "text", ['a\n{"outcome": "allowed"}', "a\r\n\u2028\u2029\x85b", '"', "\x1b[2J", "\udc80", "\0"]
)
def test_text_of_a_caller_stays_inside_of_its_line(written, text):
    before = len(written.path.read_bytes())
    deny(written.log, resource=text, reason=text)
    content = written.path.read_bytes()[before:]
    assert content.count(b"\n") == 1
    assert content.isascii()
    assert content.rstrip(b"\n").decode().isprintable()
    assert written.lines()[-1]["resource"] == text


def test_long_text_is_cut(written):
    deny(written.log, resource="x" * 100_000)
    assert len(written.path.read_bytes()) < 2000


def test_repeated_refusal_is_counted(written):
    for _ in range(42):
        deny(written.log)
    deny(written.log, resource="/default/other")
    assert len(written.lines()) == 2
    written.clock.advance(10)
    deny(written.log)
    lines = written.lines()
    assert [line.get("repeated") for line in lines] == [None, None, 41, None]
    deny(written.log)
    written.log.close()
    assert written.lines()[-1]["repeated"] == 1


def test_changes_are_all_written(written):
    for _ in range(50):
        written.log.record(Outcome.ALLOWED, action="create", principal=ALICE)
    assert len(written.lines()) == 50


def test_flood_of_strangers_is_bounded(written):
    """Ten thousand peers with reasons of their own; what is left out is counted."""
    for n in range(10_000):
        written.log.record(
            Outcome.UNAUTHENTICATED, action="send", peer=f"ipv4:10.0.{n // 256}.{n % 256}:1"
        )
    assert len(written.lines()) == 200
    deny(written.log)
    assert written.lines()[-1]["suppressed"] == 9_800, "callers that are known have room"
    written.clock.advance(60)
    written.log.record(Outcome.UNAUTHENTICATED, action="send", peer="ipv4:10.1.1.1:1")
    assert len(written.lines()) == 202


def test_ports_of_a_stranger_do_not_matter(written):
    for port in range(100):
        written.log.record(Outcome.UNAUTHENTICATED, action="send", peer=f"ipv4:10.0.0.1:{port}")
    assert len(written.lines()) == 1


def test_flood_of_refusals_is_bounded(written):
    for n in range(5_000):
        deny(written.log, resource=f"/default/t{n}")
    assert len(written.lines()) == 2_000


def test_file_is_rotated(tmp_path):
    written = Written(tmp_path, file_bytes_max=2_000)
    for n in range(200):
        written.log.record(Outcome.ALLOWED, action=f"create-{n}", principal=ALICE)
    written.log.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 6, "the file and five before it"
    assert all(file.stat().st_size <= 2_000 for file in files)
    assert all(file.stat().st_mode & 0o007 == 0 for file in files)


def test_older_lines_stay(tmp_path):
    for n in range(2):
        written = Written(tmp_path)
        written.log.record(Outcome.ALLOWED, action=f"create-{n}", principal=ALICE)
        written.log.close()
        written.log.close()
    assert [line["action"] for line in written.lines()] == ["create-0", "create-1"]


def test_file_that_cannot_be_made_stops_the_start(tmp_path):
    with pytest.raises(ConfigError, match="audit_file"):
        AuditLog(str(tmp_path / "none" / "audit"), clock=ManualClock())
    target = tmp_path / "target"
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(ConfigError, match="audit_file"):
        AuditLog(str(tmp_path / "link"), clock=ManualClock())
    assert not target.exists()


def test_full_disk_is_said_once_and_stops_nothing(written, caplog):
    """/dev/full takes no byte."""
    log = AuditLog("/dev/full", clock=written.clock)
    with caplog.at_level(logging.ERROR):
        for n in range(3):
            deny(log, resource=str(n))
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage() == "the audit file cannot be written to"
    log.close()


def test_without_a_file_lines_go_to_the_log(caplog):
    log = AuditLog(None, clock=ManualClock())
    with caplog.at_level(logging.INFO, logger="ister.audit"):
        deny(log)
    (record,) = caplog.records
    assert json.loads(record.getMessage())["principal"] == "user:alice"
    log.close()
