"""`ister inspect checkpoint` on both kinds, on damaged ones and on those of a newer Ister."""

import json

import pytest

import ister
from ister.cli.main import main
from ister.format.checkpoint import UploaderCheckpoint, encode_uploader_checkpoint
from tests.support.builders import with_bit_flipped, with_valid_crc


@pytest.fixture
def wal_checkpoint(tmp_path):
    with ister.open(tmp_path / "data") as log:
        log.topic("/default/orders", create=True, ack="written").append_many([b"a", b"b"])
    return tmp_path / "data" / "wal" / "default" / "orders" / "wal.ckpt"


def test_wal_checkpoint_shows_its_fields(wal_checkpoint, capsys):
    for path in (wal_checkpoint, wal_checkpoint.parent):
        assert main(["inspect", "checkpoint", str(path), "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["kind"] == "wal"
        assert printed["damaged"] is False
        assert (printed["synced"], printed["last_offset"]) == (2, 1)
        assert (printed["ack"], printed["codec"]) == ("written", "bincode2")
        assert printed["active_file_name"] == "wal.log"
        assert printed["rotated_files"] == []
    assert main(["inspect", "checkpoint", str(wal_checkpoint)]) == 0
    assert "synced: 2\n" in capsys.readouterr().out


def test_rotated_files_are_listed(tmp_path, capsys):
    wal = {"dir": str(tmp_path), "rotate_max_bytes": 4096}
    with ister.open({"storage": {"wal": wal}}) as log:
        topic = log.topic("/default/orders", create=True)
        for _ in range(3):
            topic.wait(topic.append(b"x" * 5000))
    path = str(tmp_path / "default" / "orders")
    assert main(["inspect", "checkpoint", path, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [file["first_offset"] for file in printed["rotated_files"]] == [0, 1]
    assert main(["inspect", "checkpoint", path]) == 0
    assert "rotated_files: 2\n  seq 0, path wal.log, first_offset 0\n" in capsys.readouterr().out


def test_uploader_checkpoint_shows_its_fields(tmp_path, capsys):
    path = tmp_path / "uploader.ckpt"
    path.write_bytes(
        encode_uploader_checkpoint(
            UploaderCheckpoint(
                last_committed_offset=41,
                last_read_file_seq=2,
                last_read_byte_position=4096,
                last_object_id=None,
                updated_at=1_700_000_000,
            )
        )
    )
    assert main(["inspect", "checkpoint", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["kind"] == "uploader"
    assert printed["last_committed_offset"] == 41
    assert printed["last_object_id"] is None
    assert main(["inspect", "checkpoint", str(path)]) == 0
    assert "last_object_id: -\n" in capsys.readouterr().out


def test_damaged_checkpoint_fails(wal_checkpoint, capsys):
    data = wal_checkpoint.read_bytes()
    for harm in (with_bit_flipped(data, 40), data[:-1], b"", b"something else " * 100):
        wal_checkpoint.write_bytes(harm)
        assert main(["inspect", "checkpoint", str(wal_checkpoint), "--json"]) == 1, harm
        shown = capsys.readouterr()
        assert json.loads(shown.out)["damaged"] is True, harm
        assert "damaged" in shown.err, harm


def test_newer_version_is_not_called_damaged(wal_checkpoint, capsys):
    content = bytearray(wal_checkpoint.read_bytes()[:-4])
    content[4] = 9
    wal_checkpoint.write_bytes(with_valid_crc(bytes(content)))
    assert main(["inspect", "checkpoint", str(wal_checkpoint)]) == 1
    shown = capsys.readouterr()
    assert "version 9" in shown.err
    assert "damaged" not in shown.err


def test_missing_checkpoint_is_an_error(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "none"):
        assert main(["inspect", "checkpoint", str(path)]) == 1
        assert capsys.readouterr().err.startswith("ister: ")
