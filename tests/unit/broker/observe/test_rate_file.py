"""The file with the rates of the last hour and day."""

import os

import pytest

from ister.broker.observe import rate_file
from ister.broker.observe.rate_file import DAY, HOUR, POINTS, SIZE_BYTES, TOPICS_MAX, RateFile

NOW = 1_760_745_600
TOPIC = "/default/orders"


def write(file):
    file.write(file.take_changes())


def filled(path, *, seconds=3600, value=10.0):
    """A file with samples of a topic and of all topics up to `NOW`."""
    file = RateFile(str(path))
    for at in range(NOW - seconds, NOW, 10):
        for name in (None, TOPIC):
            file.add(name, at, (value, 2 * value, 100.0, 5.0, 7.0))
    write(file)
    return file


def times(points):
    return [time for time, _ in points]


def test_points_are_means_and_survive_a_restart(tmp_path):
    path = tmp_path / ".rates"
    file = RateFile(str(path))
    for number in range(4):
        file.add(TOPIC, NOW + number * 2, (number, 10.0, 0.0, 1.0, 2.0))
    file.add(TOPIC, NOW + HOUR.seconds, (8.0, 0.0, 0.0, 0.0, 0.0))
    write(file)
    again = RateFile(str(path))
    assert again.read(TOPIC, HOUR, NOW + HOUR.seconds) == [
        (NOW, (1.5, 10.0, 0.0, 1.0, 2.0)),
        (NOW + HOUR.seconds, (8.0, 0.0, 0.0, 0.0, 0.0)),
    ]
    # An interval that a restart has interrupted goes on with the samples of before.
    again.add(TOPIC, NOW + 10, (6.5, 10.0, 0.0, 1.0, 2.0))
    assert again.read(TOPIC, HOUR, NOW + 10)[0][1][0] == pytest.approx(2.5)
    assert again.read("/default/other", HOUR, NOW) == []


def test_old_points_leave_and_times_without_a_broker_stay_empty(tmp_path):
    file = filled(tmp_path / ".rates", seconds=7200)
    assert len(file.read(None, HOUR, NOW - 1)) == POINTS
    points = file.read(None, HOUR, NOW + 1200)
    assert times(points)[-1] == NOW - HOUR.seconds
    assert len(points) == POINTS - 1200 // HOUR.seconds - 1
    assert file.read(None, HOUR, NOW + 4000) == []
    assert len(file.read(None, DAY, NOW + 4000)) == 7200 // DAY.seconds
    # A clock that was set back shows nothing of the future.
    assert file.read(None, HOUR, NOW - 90_000) == []


def test_the_file_has_one_size_and_few_topics_however_many_there_are(tmp_path):
    path = tmp_path / ".rates"
    file = RateFile(str(path))
    names = [f"/default/t{number}" for number in range(TOPICS_MAX + 20)]
    for name in names:
        file.add(name, NOW, (1.0,) * 5)
    kept = [name for name in names if file.read(name, HOUR, NOW)]
    assert kept == names[:TOPICS_MAX]
    write(file)
    assert path.stat().st_size == SIZE_BYTES < 3_000_000
    # Later, an active topic takes the place of one that is not, and nothing of it.
    later = NOW + 600
    for name in names[1:TOPICS_MAX]:
        file.add(name, later, (1.0,) * 5)
    file.add(names[-1], later, (3.0,) * 5)
    write(file)
    again = RateFile(str(path))
    assert again.read(names[0], HOUR, later) == []
    assert again.read(names[-1], HOUR, later) == [(later, (3.0,) * 5)]
    assert len(again.read(names[1], HOUR, later)) == 2
    assert path.stat().st_size == SIZE_BYTES


def test_a_torn_point_is_ignored_alone(tmp_path):
    path = tmp_path / ".rates"
    before = filled(path).read(TOPIC, HOUR, NOW - 1)
    data = bytearray(path.read_bytes())
    series = RateFile(str(path))._series[rate_file._digest(TOPIC)]
    data[rate_file._place(series, HOUR, before[-1][0]) + 20] ^= 0xFF
    path.write_bytes(data)
    after = RateFile(str(path)).read(TOPIC, HOUR, NOW - 1)
    assert after == before[:-1]


@pytest.mark.parametrize("damage", ["short", "long", "foreign", "header", "empty"])
def test_a_torn_or_foreign_file_is_ignored_and_replaced(tmp_path, damage):
    path = tmp_path / ".rates"
    filled(path)
    data = path.read_bytes()
    path.write_bytes(
        {
            "short": data[: SIZE_BYTES // 2],
            "long": data + b"x",
            "foreign": os.urandom(SIZE_BYTES),
            "header": data[:9] + b"?" + data[10:],
            "empty": b"",
        }[damage]
    )
    file = RateFile(str(path))
    assert file.read(None, HOUR, NOW - 1) == []
    file.add(None, NOW, (1.0,) * 5)
    write(file)
    assert path.stat().st_size == SIZE_BYTES
    assert RateFile(str(path)).read(None, DAY, NOW)[0][1] == (1.0,) * 5
    assert len(RateFile(str(path)).read(None, HOUR, NOW)) == 1


def test_without_a_path_nothing_is_written():
    file = RateFile(None)
    file.add(None, NOW, (1.0,) * 5)
    write(file)
    assert times(file.read(None, HOUR, NOW)) == [NOW]


def test_a_pipe_or_a_link_of_that_name_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=name):
            RateFile(str(tmp_path / name))
    file = RateFile(str(tmp_path / "rates"))
    file.write(file.take_changes())
    assert os.stat(tmp_path / "rates").st_mode & 0o007 == 0
