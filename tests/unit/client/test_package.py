"""`ister.client` is light, and says what is missing."""

import subprocess
import sys

import pytest

import ister.client


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )


def test_importing_it_loads_neither_grpc_nor_pyarrow():
    done = run(
        "import sys, ister.client\n"
        "heavy = {'grpc', 'pyarrow', 'google.protobuf', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from ister.client import Client, AsyncClient, TlsOptions\n"
        "heavy = {'grpc', 'pyarrow', 'google.protobuf', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("library", ["grpc", "pyarrow", "google.protobuf"])
def test_a_library_that_is_missing_is_named(library):
    done = run(
        f"import sys; sys.modules[{library!r}] = None\n"
        "from ister.client import Client\n"
        "try:\n    Client('127.0.0.1:1')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "import threading; assert threading.active_count() == 1\n"
    )
    assert done.stdout.startswith("ConfigError the client needs"), done
    assert "pip install 'ister[client]'" in done.stdout


def test_every_name_is_there():
    for name in ister.client.__all__:
        assert getattr(ister.client, name).__name__ == name
    assert set(ister.client.__all__) <= set(dir(ister.client))
    with pytest.raises(AttributeError):
        _ = ister.client.Nothing
