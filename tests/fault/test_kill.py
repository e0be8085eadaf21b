"""kill -9 of a real process that appends, over and over in the same directory.

The page cache survives kill -9, so these cycles prove the order of writes, recovery, rotation and
trimming under a death at any instruction. They cannot prove that anything was synced: that is what
`test_power_cut.py` is for.
"""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import ister
from ister.base.failpoints import FAILPOINTS
from ister.base.model import TopicState
from ister.config import load_config
from ister.format.frame import encode_frame, scan_frames
from ister.topic.log import Log
from ister.wal.directory import parse_log_name
from tests.support.oracle import SURVIVES_KILL, History, payload_of, settings_of, verify
from tests.support.scale import scaled
from tests.support.writer_child import WriterChild, new_seed, say_replay

# Those of a log without a bucket; `test_tier_kill` has the rest.
POINTS = sorted(point for point in FAILPOINTS if point.startswith("wal."))
CYCLES = dict.fromkeys(("written", "synced", "mixed"), scaled(2, 66))

_VISITS_MAX = {
    # One visit per topic at opening, one more per rotation.
    "wal.before_checkpoint_rename": 12,
    "wal.after_checkpoint": 12,
    "wal.after_create_file": 6,
    "wal.after_sync_directory": 6,
    "wal.after_rotate": 4,
    "wal.after_remove_file": 4,
    "wal.recovery_before_cut": 1,
    "wal.recovery_after_cut": 1,
    # One visit per topic at opening.
    "wal.recovery_before_checkpoint": 2,
}
_VISITS_MAX_OF_A_COMMIT = 40
ACKS = 60
"""What a writer that is killed at a random moment has acknowledged before, on any machine."""
_WRITER = {"topics": 3, "threads": 3, "trim_keep": 300}


def tear_tail(directory: Path, chance: random.Random) -> str:
    """Leaves half a frame, zeros or noise behind the frames of one topic's last file."""
    topic = chance.choice(sorted((directory / "wal" / "fault").iterdir()))
    logs = [p for p in topic.iterdir() if parse_log_name(p.name) is not None]
    last = max(logs, key=lambda path: parse_log_name(path.name) or 0)
    scan = scan_frames(last.read_bytes(), expected_offset=None)
    frame = encode_frame(scan.next_offset or 0, payload_of("torn.0.0#200"))
    tail = chance.choice(
        [
            frame[: chance.randrange(1, 16)],
            frame[: chance.randrange(16, len(frame))],
            bytes(chance.randrange(1, 5000)),
            chance.randbytes(chance.randrange(1, 5000)),
        ]
    )
    with last.open("ab") as file:
        file.write(tail)
    return f"{topic.name}/{last.name}+{len(tail)}"


def check_and_append(directory: Path, history: History, level: str, session: str) -> None:
    """Opens the log in this process: everything is there, and it goes on."""
    with ister.open(settings_of(str(directory), level=level)) as log:
        verify(history, log, survives=SURVIVES_KILL)
        for name in log.topics():
            topic = log.topic(name)
            before = topic.watermarks.next
            for number in range(3):
                message_id = f"{session}.{number}"
                history.send(name, message_id)
                offset = topic.append(payload_of(message_id))
                assert offset == before + number, "an append gets the next offset"
                topic.wait(offset, "synced")
                history.ack(name, message_id, offset, "synced")


def run_into(
    child: WriterChild, chance: random.Random, *, has_failpoint: bool, patience: float
) -> bool:
    """Lets a writer work until it dies at its failpoint, or kills it. True if it died by itself."""
    child.listen(60.0, until="ready")
    if not has_failpoint:
        child.listen_for(lambda: child.lines["ack"] >= ACKS, f"{ACKS} acks")
        child.listen(chance.uniform(0.02, 0.12))
    elif not child.listen(patience):
        assert child.ended() == -signal.SIGKILL, child.complaints()
        return True
    assert child.kill() == -signal.SIGKILL, child.complaints()
    return False


@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", list(CYCLES))
def test_repeated_kill_loses_nothing(tmp_path, request, level):
    """Goal: no acknowledged message is lost, changed or moved by kill -9, however often.

    Method: writers one after the other in the same directory, each killed within 120 ms of its 60th
    acknowledgement to three threads and three topics, every second one at a failpoint. This process
    opens the log after most of the kills, compares it with all acknowledgements so far and
    appends; after the others the next writer's own recovery has to cope.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(f"{seed}/{level}")
    history = History()
    points = POINTS
    chance.shuffle(points)
    died_at: dict[str, int] = {}
    started = time.monotonic()
    for cycle in range(CYCLES[level]):
        point = points[cycle // 2 % len(points)] if cycle % 2 else None
        failpoint = None
        if point is not None:
            visit = chance.randint(1, _VISITS_MAX.get(point, _VISITS_MAX_OF_A_COMMIT))
            failpoint = f"{point}=kill@{visit}"
            if "_cut" in point:
                tear_tail(tmp_path, chance)
        with WriterChild(
            tmp_path,
            history,
            failpoints=failpoint,
            level=level,
            session=f"c{cycle}",
            seed=seed,
            **_WRITER,
        ) as child:
            if run_into(child, chance, has_failpoint=bool(point), patience=0.3):
                died_at[point] = died_at.get(point, 0) + 1
        if chance.random() < 0.7 or cycle == CYCLES[level] - 1:
            check_and_append(tmp_path, history, level, f"p{cycle}")
    print(
        json.dumps(
            {
                "test": "kill -9 cycles",
                "level": level,
                "seed": seed,
                "cycles": CYCLES[level],
                "acked": history.acks,
                "sent": history.sends,
                "lost": 0,
                "died_at": died_at,
                "seconds": round(time.monotonic() - started, 1),
            }
        )
    )
    assert history.acks >= ACKS * CYCLES[level] // 2, "hardly anything was acknowledged"


@pytest.mark.parametrize("point", POINTS)
def test_kill_at_failpoint_loses_nothing(tmp_path, request, point):
    """Goal: every failpoint is reached by a plain load, and a death at it loses nothing.

    Method: some messages, then (for the recovery's points, behind a torn tail) a writer that dies
    at an early visit, by night then one that dies at the first; after each the log is compared and
    goes on.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(f"{seed}/{point}")
    history = History()
    options = {"level": "mixed", "topics": 2, "threads": 3, "trim_keep": 50}
    with WriterChild(tmp_path, history, session="a", seed=seed, messages=150, **options) as child:
        assert child.ended() == 0, child.complaints()
    early = min(3, _VISITS_MAX.get(point, 3))
    visits = [chance.randint(1, early), *scaled([], [1])]
    for number, visit in enumerate(visits):
        if point.startswith("wal.recovery_"):
            tear_tail(tmp_path, chance)
        with WriterChild(
            tmp_path,
            history,
            failpoints=f"{point}=kill@{visit}",
            session=f"b{number}",
            seed=seed,
            **options,
        ) as child:
            assert not child.listen(120.0), f"{point} was not reached {visit} times"
            assert child.ended() == -signal.SIGKILL, child.complaints()
        check_and_append(tmp_path, history, "mixed", f"p{number}")


def test_product_that_acknowledges_too_early_is_caught(tmp_path, request):
    """Goal: the cycles above can fail: acknowledgements before the write are found out.

    Method: a writer whose `wait` returns at once, killed until the oracle complains.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(seed)
    for cycle in range(20):
        history = History()
        directory = tmp_path / str(cycle)
        with WriterChild(directory, history, session="a", seed=seed, **{"break": "wait"}) as child:
            run_into(child, chance, has_failpoint=False, patience=0)
        try:
            check_and_append(directory, history, "synced", "p")
        except AssertionError as caught:
            print(f"caught by kill {cycle + 1}: {caught}")
            assert any(word in str(caught) for word in ("lost", "changed"))
            return
    pytest.fail("20 kills and no loss seen: the harness proves nothing")


def test_repeated_kill_in_recovery_loses_nothing(tmp_path, request):
    """Goal: recovery that dies again and again ends with the same log.

    Method: a torn tail, then a writer killed at each point of recovery in turn, three times over by
    night, without a look in between; then the comparison.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(f"{seed}/recovery")
    history = History()
    options = {"level": "mixed", "topics": 2, "threads": 2}
    with WriterChild(tmp_path, history, session="a", seed=seed, messages=100, **options) as child:
        assert child.ended() == 0, child.complaints()
    deaths = 0
    rounds = scaled(1, 3)
    for number in range(rounds):
        tear_tail(tmp_path, chance)
        for point in (
            "wal.recovery_before_cut",
            "wal.recovery_after_cut",
            "wal.before_checkpoint_rename",
            "wal.after_checkpoint",
        ):
            with WriterChild(
                tmp_path,
                history,
                failpoints=f"{point}=kill@1",
                session=f"b{number}{point}",
                messages=1,
                **options,
            ) as child:
                # A cut that was made is not made again: the next writer passes that point.
                deaths += child.ended() == -signal.SIGKILL
    assert deaths >= 3 * rounds, "too few deaths in recovery"
    check_and_append(tmp_path, history, "mixed", "p")


_DELETE = """
import sys
import ister
from ister.base import failpoints
with ister.open({"storage": {"mode": "local_only", "wal": {"dir": sys.argv[1]}}}) as log:
    topic = log.topic("/default/t", create=True)
    for _ in range(30):
        topic.append(b"x")
    topic.flush()
    failpoints.arm_from_environment(sys.argv[2])
    log.delete("/default/t")
"""


@pytest.mark.parametrize("point", ["delete.after_rename", "delete.after_remove_file"])
def test_killed_inside_of_a_deletion_the_topic_is_gone(tmp_path, point):
    """Goal: a deletion without a bucket is completed after kill -9, and the name is free."""
    ended = subprocess.run(
        [sys.executable, "-c", _DELETE, str(tmp_path), f"{point}=kill@1"], check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "default").iterdir()] == ["t.removed"]
    with ister.open({"storage": {"mode": "local_only", "wal": {"dir": str(tmp_path)}}}) as log:
        assert log.topics() == []
        assert not list((tmp_path / "default").iterdir())
        topic = log.topic("/default/t", create=True)
        assert topic.state is TopicState.OPEN
        assert topic.append(b"new") == 0


_GIVE_UP = """
import sys
from ister.base import failpoints
from ister.cli.main import main
failpoints.arm_from_environment(sys.argv[1])
sys.exit(main(["repair", "/default/t", "--give-up", "--yes", "--config", sys.argv[2]]))
"""


def _damaged(path: Path, *, has_bucket: bool) -> str:
    """A log whose files end before its checkpoint says; returns its config file."""
    storage = {"mode": "local_only", "wal": {"dir": str(path / "wal")}}
    if has_bucket:
        storage |= {
            "mode": "wal_cloud",
            "cloud": {"root": str(path / "objects")},
            "metadata": {"path": str(path / "metadata.db"), "lease_ttl_seconds": 3},
        }
    config = path / "ister.yml"
    config.write_text(yaml.safe_dump({"storage": storage}))
    with Log(load_config(str(config)), background=False) as log:
        topic = log.topic("/default/t", create=True)
        for number in range(30):
            topic.append(b"%d" % number)
        topic.flush()
    file = path / "wal" / "default" / "t" / "wal.log"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return str(config)


@pytest.mark.parametrize(
    "point",
    sorted(point for point in FAILPOINTS if point.startswith("repair.")),
)
def test_killed_while_it_gives_up_the_next_repair_ends_the_same(tmp_path, point):
    """Goal: `ister repair --give-up` may be killed at any point, and repeated."""
    has_bucket = point in ("repair.after_object", "repair.after_commit")
    config = _damaged(tmp_path, has_bucket=has_bucket)
    for failpoint, code in ((f"{point}=kill@1", -signal.SIGKILL), ("", 0)):
        ended = subprocess.run(
            [sys.executable, "-c", _GIVE_UP, failpoint, config],
            check=False,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == code, ended.stderr
    with Log(load_config(config), background=False) as log:
        topic = log.topic("/default/t")
        found = [int(message.payload) for message in topic.read("earliest")]
        assert found == list(range(len(found)))
        assert 0 < len(found) < 30
        assert topic.append(b"next") == 30
