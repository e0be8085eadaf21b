"""`ister backup`: copies of a data directory in use, each of which opens clean."""

import json
import os
import random
import threading

import pytest
import yaml

import ister
from ister.base.clock import SystemClock
from ister.base.model import TopicState
from ister.cli.main import main
from ister.config import load_config
from ister.topic import backup
from ister.topic.log import Log
from tests.support.cases import each
from tests.support.machine import eventually
from tests.support.scale import scaled

NAMES = [f"/default/t{number}" for number in range(3)]
COPIES = scaled(2, 30)
SETTINGS = {
    "wal_cloud": {
        "wal": {"rotate_max_bytes": 16 * 1024, "retention": {"time_minutes": 0}},
        "uploader": {"interval_seconds": 1, "max_batch_bytes": 64 * 1024},
    },
    "local_only": {"wal": {"rotate_max_bytes": 16 * 1024}},
}


def settings_of(path, mode):
    tree = {"storage": {"mode": mode, **SETTINGS[mode]}}
    wal = {**SETTINGS[mode]["wal"], "dir": str(path / "wal")}
    tree["storage"]["wal"] = wal
    if mode == "wal_cloud":
        tree["storage"]["cloud"] = {"root": str(path / "objects")}
        tree["storage"]["metadata"] = {"path": str(path / "metadata.db")}
    return tree


def config_of(path, mode):
    file = path.parent / f"{path.name}.yml"
    file.write_text(yaml.safe_dump(settings_of(path, mode)))
    return str(file)


class Load:
    """Threads that append, wait for `synced`, and note what was acknowledged."""

    def __init__(self, log, seed):
        self.acked = dict.fromkeys(NAMES, 0)
        self._log = log
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(name, random.Random(f"{seed}/{name}")))
            for name in NAMES
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, name, chance):
        topic = self._log.topic(name, create=True)
        number = 0
        while not self._stopping.is_set():
            for _ in range(chance.randint(1, 20)):
                topic.append(b"%09d" % number * chance.randint(1, 50))
                number += 1
            topic.wait(number - 1, "synced")
            self.acked[name] = number
            self._log.trim(name)
            self._stopping.wait(0.005)


def check_copy(path, mode, acked):
    """The copy opens clean with everything acknowledged before, and takes messages."""
    with Log(load_config(settings_of(path, mode)), background=False) as log:
        for name, count in acked.items():
            if count == 0:
                continue
            topic = log.topic(name)
            assert (topic.state, topic.damage) == (TopicState.OPEN, ())
            numbers = [int(message.payload[:9]) for message in topic.read("earliest")]
            assert numbers == list(range(topic.earliest, topic.watermarks.next))
            assert topic.watermarks.next >= count
            assert topic.append(b"next") == topic.watermarks.next - 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["wal_cloud", "local_only"])
def test_copies_under_load_open_clean_with_all_that_was_acknowledged(tmp_path, mode, capsys):
    """Goal: a copy of a log in use opens without repair, and lacks nothing from before it began.

    Method: three threads append to topics whose files rotate, are uploaded and trimmed all the
    time; meanwhile the directory is copied again and again. Each copy is opened.
    """
    seed = int(os.environ.get("ISTER_FAULT_SEED", "1"))
    print(f"ISTER_FAULT_SEED={seed}")
    capsys.readouterr()
    config = config_of(tmp_path / "data", mode)
    promises = []
    with ister.open(settings_of(tmp_path / "data", mode)) as log, Load(log, seed) as load:
        eventually(lambda: min(load.acked.values()) > 100, 30)
        for number in range(COPIES):
            promises.append(dict(load.acked))
            copy = str(tmp_path / f"copy{number}")
            assert main(["backup", copy, "--config", config, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["topics"] == len(NAMES)
    for number, acked in enumerate(promises):
        check_copy(tmp_path / f"copy{number}", mode, acked)


# -- one moment at a time -------------------------------------------------------------------------


def a_log(path, mode, count=40):
    """A log with a topic in several files, all of which may go once they are uploaded."""
    log = Log(load_config(settings_of(path, mode)), background=False)
    append(log.topic(NAMES[0], create=True), count)
    return log


def append(topic, count):
    first = topic.watermarks.next
    for start in range(first, first + count, 10):
        topic.append_many([b"%09d" % number * 100 for number in range(start, start + 10)])
        topic.flush()


def grow(log):
    append(log.topic(NAMES[0]), 60)


def upload_and_trim(log):
    append(log.topic(NAMES[0]), 60)
    if log.topic(NAMES[0]).bucket is not None:
        log.topic(NAMES[0]).upload()
    log.topic(NAMES[0]).wal.trim(log.topic(NAMES[0]).watermarks.next)


def create(log):
    append(log.topic(NAMES[1], create=True), 30)


def make_again(log):
    log.delete(NAMES[0])
    append(log.topic(NAMES[0], create=True), 10)


def delete(log):
    log.delete(NAMES[0])


_MOMENTS = [
    (step, is_before)
    for step in (
        "_copy_metadata",
        "_copy_files",
        "_try_copy_topic",
        "_copy_bytes",
        "_begin_of",
        "_copy_objects",
        "_check",
    )
    for is_before in (True, False)
]
CHANGES = scaled(
    [
        (grow, "_begin_of", True),  # the last file is copied
        (upload_and_trim, "_copy_files", True),
        (upload_and_trim, "_copy_bytes", True),
        (create, "_copy_files", True),
        (make_again, "_copy_bytes", True),
        (delete, "_copy_files", True),
    ],
    [
        (change, *moment)
        for change in (grow, upload_and_trim, create, make_again, delete)
        for moment in _MOMENTS
    ],
)


@pytest.mark.parametrize("mode", ["wal_cloud", "local_only"])
@each(("change", "step", "is_before"), CHANGES)
def test_copy_opens_clean_whatever_happens_before_or_after_a_step(
    tmp_path_factory, mode, change, step, is_before
):
    """Goal: appends, rotation, trims, uploads, new and deleted topics do not disturb the copy."""
    path = tmp_path_factory.mktemp("moment")
    with a_log(path / "data", mode) as log, pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda fd: None)
        real, left = getattr(backup._Backup, step), [change]

        def change_once(self, *arguments):
            if is_before and left:
                left.pop()(log)
            done = real(self, *arguments)
            if left:
                left.pop()(log)
            return done

        patch.setattr(backup._Backup, step, change_once)
        config = load_config(settings_of(path / "data", mode))
        backup.back_up(config, str(path / "copy"), clock=SystemClock())
    with Log(load_config(settings_of(path / "copy", mode)), background=False) as log:
        for name in log.topics():
            topic = log.topic(name)
            assert (topic.state, topic.damage) == (TopicState.OPEN, ())
            numbers = [int(message.payload[:9]) for message in topic.read("earliest")]
            assert numbers == list(range(topic.earliest, topic.watermarks.next))
        if change in (grow, upload_and_trim, create):
            assert log.topic(NAMES[0]).watermarks.next >= 40


# -- what is refused ----------------------------------------------------------------------------


def test_directory_that_exists_or_is_inside_is_refused(tmp_path, capsys):
    a_log(tmp_path / "data", "local_only").close()
    config = config_of(tmp_path / "data", "local_only")
    for target in (tmp_path / "data", tmp_path / "data" / "wal" / "copy"):
        assert main(["backup", str(target), "--config", config, "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["ok"] is False
    assert not (tmp_path / "data" / "wal" / "copy.partial").exists()


def test_backup_that_was_killed_is_replaced_by_the_next(tmp_path, capsys):
    a_log(tmp_path / "data", "local_only").close()
    left_over = tmp_path / "copy.partial" / "wal" / "default" / "gone"
    left_over.mkdir(parents=True)
    (left_over / "wal.log").write_bytes(b"half")
    config = config_of(tmp_path / "data", "local_only")
    assert main(["backup", str(tmp_path / "copy"), "--config", config]) == 0
    assert "topics: 1," in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "data", "data.yml"]
    assert not (tmp_path / "copy" / "wal" / "default" / "gone").exists()
