"""The socket between the engines: any path, replaced after a kill, removed at the end."""

import os
import socket

import pytest

from ister.broker.rpc.forward_socket import SocketFile
from ister.errors import ConfigError
from ister.wire import ister_api
from tests.support.broker import a_broker

NAME = ".grpc.sock"


def test_a_path_of_any_length_can_be_bound_and_connected(tmp_path):
    directory = tmp_path / ("long-" * 20) / ("name-" * 20)
    directory.mkdir(parents=True)
    place = SocketFile(str(directory))
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(place.path)
        server.listen()
        client.connect(place.path)
        assert (directory / NAME).is_socket()
    place.close()
    assert not os.listdir(directory)


def test_a_temporary_place_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = SocketFile(None)
    assert len(os.listdir(tmp_path)) == 1
    place.close()
    place.close()
    assert not os.listdir(tmp_path)


def test_place_that_cannot_be_made_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="needs a directory for a socket") as refused:
        SocketFile(None)
    assert "TMPDIR" in refused.value.hint


async def test_a_broker_replaces_the_socket_of_a_killed_one_and_removes_its_own(tmp_path):
    settings = {"broker": {"grpc": {"engine": "native"}}}

    async def scenario(*, leave):
        async with a_broker(tmp_path, settings) as (broker, services, _):
            (found,) = tmp_path.rglob(NAME)
            assert found.is_socket()
            await services.admin.Info(ister_api.InfoRequest())
            if leave:
                await broker.stop(leave_connections=True)
                assert not found.exists()
                await broker._left.stop(None)
        assert not found.exists()
        return found

    place = await scenario(leave=True)
    with socket.socket(socket.AF_UNIX) as left:
        descriptor = os.open(place.parent, os.O_RDONLY)
        left.bind(f"/proc/self/fd/{descriptor}/{NAME}")
        os.close(descriptor)
    assert place.exists()
    await scenario(leave=False)
