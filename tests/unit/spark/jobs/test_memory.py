"""Memory of a driver, its JVM and their workers, from a `/proc` that was made up."""

import os

import pytest

from ister.spark.jobs.memory import sample_memory

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def proc(tmp_path):
    def add(pid, parent, name, pages):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0\n")
        (tmp_path / str(pid) / "statm").write_text(f"999 {pages} 3 4\n")

    (tmp_path / "self").mkdir()
    add(os.getpid(), 1, "python", 10)
    add.root = str(tmp_path)
    return add


def test_jvm_and_what_is_below_it(proc):
    own, jvm = os.getpid(), 10**8
    proc(jvm, own, "java", 100)
    proc(jvm + 1, jvm, "a (strange) name", 5)
    proc(jvm + 2, jvm + 1, "python", 7)
    proc(jvm + 3, own, "not ours", 1000)
    proc(jvm + 4, 1, "java", 1000)
    assert sample_memory(proc.root) == {
        "driver_rss_bytes": 10 * PAGE,
        "jvm_rss_bytes": 100 * PAGE,
        "workers_rss_bytes": 12 * PAGE,
        "workers": 2,
    }


def test_without_a_jvm_and_without_anything(proc, tmp_path):
    found = sample_memory(proc.root)
    assert found["driver_rss_bytes"] == 10 * PAGE
    assert found["jvm_rss_bytes"] is found["workers"] is None
    assert set(sample_memory(str(tmp_path / "nowhere")).values()) == {None}


def test_process_that_ends_while_it_is_looked_at(proc, tmp_path):
    own, jvm = os.getpid(), 10**8
    proc(jvm, own, "java", 100)
    proc(jvm + 1, jvm, "python", 5)
    (tmp_path / str(jvm + 1) / "statm").unlink()
    assert sample_memory(proc.root)["workers"] == 0
