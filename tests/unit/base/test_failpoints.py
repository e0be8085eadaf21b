"""Named points: each exists in the code, and an armed one acts at its visit."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ister
from ister.base import failpoints
from ister.base.failpoints import FAILPOINTS, arm, arm_from_environment, reach
from ister.errors import InvalidRequestError
from ister.format.checkpoint import UploaderCheckpoint, WalState
from ister.wal.directory import WalDirectory
from tests.support.cases import each
from tests.support.memory_fs import MemoryFileSystem

_SOURCE = Path(ister.__file__).resolve().parent


# A checkpoint is replaced in the same way by both of these.
_WHO = {"{who}": ("wal", "tier")}


def _names(template):
    """The points that a name in the code stands for."""
    for part, values in _WHO.items():
        if part in template:
            return {template.replace(part, value) for value in values}
    return {template}


def test_points_in_the_list_are_those_in_the_code():
    reached = {
        name
        for path in _SOURCE.rglob("*.py")
        for template in re.findall(r'reach\(f?"([^"]+)"\)', path.read_text())
        for name in _names(template)
        if path.name != "failpoints.py"
    }
    assert reached == FAILPOINTS


@each("who", ["wal", "tier"])
def test_checkpoint_reaches_the_points_of_who_replaces_it(who):
    reached = []
    for name in sorted(FAILPOINTS):
        arm(name, lambda name=name: reached.append(name))
    fs = MemoryFileSystem()
    fs.make_directories("/data/default/orders")
    directory = WalDirectory(fs, "/data/default/orders")
    if who == "wal":
        directory.save_state(WalState(synced=0, synced_position=0))
    else:
        directory.save_uploader(
            UploaderCheckpoint(
                last_committed_offset=0,
                last_read_file_seq=0,
                last_read_byte_position=0,
                last_object_id=None,
                updated_at=0,
            )
        )
    assert reached == [f"{who}.before_checkpoint_rename", f"{who}.after_checkpoint"]


def test_unknown_point_is_refused_with_those_there_are():
    with pytest.raises(InvalidRequestError, match=r"wal\.after_writ'.*wal\.after_write"):
        arm("wal.after_writ", lambda: None)


@each(
    "text",
    [
        "wal.after_write",
        "wal.after_write=kill",
        "wal.after_write=stop@1",
        "wal.after_write=kill@",
        "wal.after_write=kill@-1",
        "wal.after_write=kill@x",
        "nowhere=kill@1",
        "=",
    ],
)
def test_specification_of_another_form_is_refused(text):
    with pytest.raises(InvalidRequestError):
        arm_from_environment(text)


def test_specification_kills_at_the_given_visit(monkeypatch):
    killed = []
    monkeypatch.setattr(
        failpoints.signal, "pthread_kill", lambda thread, number: killed.append((thread, number))
    )
    arm_from_environment("wal.after_write=kill@3,wal.before_sync=pause@1")
    for _ in range(5):
        reach("wal.after_write")
    reach("wal.before_sync")
    here = threading.get_ident()
    assert killed == [(here, signal.SIGKILL), (here, signal.SIGSTOP)]


def test_process_is_armed_by_its_environment(tmp_path):
    code = (
        "import ister\n"
        f"with ister.open({str(tmp_path)!r}) as log:\n"
        "    topic = log.topic('/a/b', create=True)\n"
        "    for n in range(9): topic.wait(topic.append(b'%d' % n)); print(n, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ISTER_FAILPOINTS": "wal.before_sync=kill@4"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == [b"0", b"1", b"2"]
    with ister.open(tmp_path) as log:
        found = [m.payload for m in log.topic("/a/b").read()]
    assert found[:3] == [b"0", b"1", b"2"]
