"""Compiled loops: never compiled where somebody is served, never loaded from a doubtful cache."""

import importlib.util
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading

import pytest

from ister import kernels
from tests.support.waiting import PATIENCE_SECONDS, eventually

if any(importlib.util.find_spec(name) is None for name in ("numba", "isal")):
    pytest.skip("the extra `fast` is what is tested here", allow_module_level=True)


@pytest.fixture(scope="module")
def whole():
    """The cache of this machine, with everything in it."""
    assert kernels.load()
    return kernels._open_cache()


@pytest.fixture
def cache(tmp_path, monkeypatch, whole):
    """A copy of it, which is this test's; nothing is loaded, and nothing can be compiled."""
    monkeypatch.setenv(kernels.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "_current", None)
    directory = kernels._open_cache()
    shutil.copytree(whole, directory, dirs_exist_ok=True)
    asked = []
    monkeypatch.setattr(kernels, "_compile_elsewhere", lambda path: bool(asked.append(path)))
    return directory, asked


def data_files(directory):
    return [os.path.join(directory, name) for name in sorted(kernels._files(directory))]


def test_complete_cache_is_loaded_without_compiling(cache):
    directory, asked = cache
    kernels._load_or_compile()
    assert kernels.current() is not None
    assert asked == []
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700


def test_a_server_waits_for_the_cache(cache, monkeypatch):
    monkeypatch.setattr(kernels, "_loading", None)
    monkeypatch.setattr(kernels, "_is_settled", threading.Event())
    assert kernels.load_cached(PATIENCE_SECONDS)


def test_a_server_does_not_wait_for_the_compiler(cache, monkeypatch):
    directory, _ = cache
    os.unlink(f"{directory}/{kernels._LIST_NAME}")
    is_ended = threading.Event()
    monkeypatch.setattr(kernels, "_loading", None)
    monkeypatch.setattr(kernels, "_is_settled", threading.Event())
    monkeypatch.setattr(kernels, "_compile_elsewhere", lambda path: is_ended.wait() and False)
    assert not kernels.load_cached(PATIENCE_SECONDS)
    assert kernels._loading.is_alive(), "the compiler runs"
    is_ended.set()
    kernels._loading.join()


def test_a_server_has_the_loops_compiled_when_it_starts_and_loads_them_when_it_needs_them(
    cache, monkeypatch
):
    directory, _ = cache
    listed = f"{directory}/{kernels._LIST_NAME}"
    os.rename(listed, f"{listed}.kept")
    begun, is_compiled = [], threading.Event()

    def compile_elsewhere(path):
        begun.append(path)
        assert is_compiled.wait(PATIENCE_SECONDS)
        os.rename(f"{listed}.kept", listed)
        return True

    monkeypatch.setattr(kernels, "_compile_elsewhere", compile_elsewhere)
    monkeypatch.setattr(kernels, "_loading", None)
    monkeypatch.setattr(kernels, "_is_settled", threading.Event())
    kernels.prepare()
    eventually(lambda: begun, "the compiler runs")
    assert not kernels.load_cached(PATIENCE_SECONDS)
    is_compiled.set()
    assert kernels.load(PATIENCE_SECONDS)
    assert begun == [directory], "both waited for one compiler"


def test_a_server_loads_nothing_when_it_starts(cache):
    _, asked = cache
    kernels._prepare()
    assert kernels.current() is None
    assert asked == []


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "no list", "bad list", "another file"])
def test_a_damaged_cache_is_not_loaded_but_compiled_again(cache, damage):
    directory, asked = cache
    path, listed = data_files(directory)[0], f"{directory}/{kernels._LIST_NAME}"
    if damage == "remove":
        os.unlink(path)
    elif damage == "no list":
        os.unlink(listed)
    elif damage == "bad list":
        with open(listed, "w") as file:
            file.write("{")
    elif damage == "another file":
        shutil.copy(path, f"{path}.nbc")
    else:
        with open(path, "r+b") as file:
            if damage == "flip":
                file.seek(20)
                file.write(b"\xff\x00\xff")
            else:
                file.truncate(10)
    kernels._load_or_compile()
    assert kernels.current() is None
    assert asked == [directory]


def test_cache_files_that_are_not_code_are_compiled_again(cache, caplog):
    """The list is right, and what it lists cannot be loaded."""
    directory, asked = cache
    for path in data_files(directory):
        if path.endswith(".nbc"):
            with open(path, "wb") as file:
                file.write(b"no pickle")
    with open(f"{directory}/{kernels._LIST_NAME}", "w") as file:
        json.dump(kernels._files(directory), file)
    with caplog.at_level(logging.WARNING, logger="ister"):
        kernels._load_or_compile()
    assert kernels.current() is None
    assert asked == [directory]
    assert [record.getMessage() for record in caplog.records] == ["cannot load compiled loops"]


def test_command_says_where_the_loops_are_and_nothing_else(whole):
    ended = subprocess.run(
        [sys.executable, "-m", "ister.kernels", whole], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"compiled loops are in {whole}\n"


def test_what_is_not_in_the_cache_is_not_compiled_here(tmp_path):
    with pytest.raises(kernels._NotCachedError):
        kernels._build(str(tmp_path), is_compiling=False)


@pytest.mark.parametrize("which", ["root", "version"])
def test_a_directory_that_others_may_write_to_is_not_used(cache, caplog, which):
    directory, asked = cache
    os.chmod(directory if which == "version" else os.path.dirname(directory), 0o777)
    with caplog.at_level(logging.WARNING, logger="ister"):
        kernels._load_or_compile()
    assert kernels.current() is None
    assert asked == []
    [record] = caplog.records
    assert "another user" in record.error


def test_a_link_in_its_place_is_not_followed(cache, tmp_path):
    directory, asked = cache
    os.rename(directory, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", directory)
    kernels._load_or_compile()
    assert kernels.current() is None
    assert asked == []


def test_python_loops_are_used_without_a_cache_directory(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "_current", None)
    monkeypatch.setenv(kernels.CACHE_VARIABLE, "/proc/ister")
    with caplog.at_level(logging.WARNING, logger="ister"):
        kernels._load_or_compile()
    assert kernels.current() is None
    assert len(caplog.records) == 1


@pytest.fixture
def fake_compiler(monkeypatch):
    built = []

    def build(directory, *, is_compiling):
        assert is_compiling
        built.append(sorted(kernels._files(directory)))
        with open(f"{directory}/one.nbc", "wb") as file:
            file.write(b"code")

    monkeypatch.setattr(kernels, "_build", build)
    return built


def test_several_processes_compile_once(tmp_path, fake_compiler):
    compilers = [
        threading.Thread(target=kernels.compile_into, args=(str(tmp_path),)) for _ in range(4)
    ]
    for compiler in compilers:
        compiler.start()
    for compiler in compilers:
        compiler.join()
    assert fake_compiler == [[]]
    assert kernels._is_complete(str(tmp_path))


def test_cache_of_a_killed_compiler_is_not_used(tmp_path, fake_compiler):
    (tmp_path / "half.nbc").write_bytes(b"ha")
    assert not kernels._is_complete(str(tmp_path))
    kernels.compile_into(str(tmp_path))
    assert fake_compiler == [[]]
    assert kernels._is_complete(str(tmp_path))


def test_failing_compiler_is_logged_once(monkeypatch, tmp_path, caplog, whole):
    monkeypatch.setattr(kernels, "_current", None)
    monkeypatch.setenv(kernels.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with caplog.at_level(logging.WARNING, logger="ister"):
        kernels._load_or_compile()
    assert kernels.current() is None
    assert [record.getMessage() for record in caplog.records] == ["cannot compile loops"]


def test_python_loops_are_used_when_numba_is_disabled(whole):
    script = "import logging; logging.disable()\nfrom ister import kernels\nprint(kernels.load())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert done.stdout.strip() == "False"


def test_programs_own_functions_keep_their_cache(whole):
    import numba  # noqa: PLC0415

    before = numba.config.CACHE_DIR
    kernels._build(whole, is_compiling=False)
    assert before == numba.config.CACHE_DIR
