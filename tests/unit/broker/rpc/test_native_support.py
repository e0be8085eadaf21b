"""Whether the native engine can be used on this machine."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from ister.broker.rpc import native_support
from ister.broker.rpc.native_support import NATIVE_VERSION, native_refusal
from tests.support.cases import each

PROJECT = Path(__file__).resolve().parents[4] / "pyproject.toml"


def test_the_extra_asks_for_the_tested_version():
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    assert extras["native"] == [f"pygrpc-native=={NATIVE_VERSION}"]


def test_a_missing_or_other_version_is_refused(monkeypatch):
    def missing(_):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", missing)
    assert "install ister[native]" in native_refusal()
    monkeypatch.setattr(metadata, "version", lambda _: "0.6.0")
    assert "0.6.0" in native_refusal()
    monkeypatch.setattr(metadata, "version", lambda _: NATIVE_VERSION)
    assert native_refusal() is None


def test_strict_accounting_of_memory_is_refused(monkeypatch, tmp_path):
    pytest.importorskip("pygrpc_native")
    setting = tmp_path / "overcommit_memory"
    setting.write_text("2\n")
    monkeypatch.setattr(native_support, "_OVERCOMMIT", setting)
    assert "vm.overcommit_memory" in native_refusal()


@each(("gib", "expected"), [(3, "4 GiB of address space"), (8, "None")])
def test_a_machine_that_cannot_set_aside_a_message_is_refused(gib, expected):
    """In a process of its own, whose memory is limited."""
    pytest.importorskip("pygrpc_native")
    code = (
        "import resource; from ister.broker.rpc.native_support import native_refusal; "
        f"resource.setrlimit(resource.RLIMIT_AS, ({gib} << 30, {gib} << 30)); "
        "print(native_refusal())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.startswith(expected)
