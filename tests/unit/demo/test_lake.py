"""What is missing for Spark is said before anything is started."""

import importlib.util
import os

import pytest

from demo.lake import find_missing


@pytest.fixture
def java(tmp_path, monkeypatch):
    """A Java of any version."""

    def make(version):
        program = tmp_path / "bin" / "java"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
        os.chmod(program, 0o755)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    return make


def test_a_java_that_is_new_enough_is_taken(java):
    for version in ["17.0.15", "21", "25-ea"]:
        java(version)
        assert find_missing() == [], version


def test_a_java_that_is_too_old_is_named(java):
    for version, shown in [("1.8.0_402", "Java 8"), ("11.0.2", "Java 11")]:
        java(version)
        (missing,) = find_missing()
        assert shown in missing, version
        assert "JAVA_HOME" in missing, version


def test_no_java_is_stopped_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    (missing,) = find_missing()
    assert "Java 17" in missing
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", "")
    assert find_missing() == [missing]


def test_no_pyspark_is_stopped_with_what_to_install(java, monkeypatch):
    java("17.0.1")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "demo.lake.importlib.util.find_spec",
        lambda name, *more: None if name == "pyspark" else found(name, *more),
    )
    (missing,) = find_missing()
    assert "ister[spark]" in missing
