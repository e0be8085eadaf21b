"""What the contenders of `make peers` share."""

import os
import subprocess
import sys

import pytest

from benchmarks.peers import install
from benchmarks.peers.contender import MissingError, Quota, chunked
from benchmarks.peers.processes import resident_mib
from benchmarks.peers.statistics import quantile, spread


def test_quantile_is_the_nearest_rank():
    values = [float(number) for number in range(100, 0, -1)]
    assert [quantile(values, q) for q in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert quantile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_spread_is_a_share_of_the_median():
    assert spread([80.0, 100.0, 130.0]) == 0.5
    assert spread([3.0]) == 0.0


def test_chunks_have_all_payloads_in_order():
    payloads = [b"%d" % number for number in range(7)]
    chunks = list(chunked(iter(payloads), 3))
    assert [len(chunk) for chunk in chunks] == [3, 3, 1]
    assert [payload for chunk in chunks for payload in chunk] == payloads


def test_quota_ends_with_its_messages_or_its_time():
    by_count = Quota(10, 1e9)
    by_count.begin()
    assert by_count.take(9)
    assert not by_count.take(1)
    by_time = Quota(10, 0.0)
    by_time.begin()
    assert not by_time.take(1)
    assert by_time.elapsed > 0


def test_memory_counts_descendants():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        alone = resident_mib([os.getpid()])
        # The grandchild is another interpreter: both are larger than one by some MiB.
        while resident_mib([child.pid]) < 12:
            assert child.poll() is None
        assert resident_mib([os.getpid()]) > alone
    finally:
        child.communicate()


def test_what_cannot_be_installed_is_missing_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for work in (
        lambda: install.install_kafka(tmp_path),
        lambda: install.install_debian(tmp_path, "redis-server"),
    ):
        with pytest.raises(MissingError, match="is not installed"):
            work()
