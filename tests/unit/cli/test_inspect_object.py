"""`ister inspect object` on whole and damaged objects: files, names in a bucket, URLs."""

import shutil

import pytest
import yaml

import ister
from ister.base.limits import RECOVERY_CHUNK_BYTES
from ister.base.model import Codec
from ister.cli.main import main
from ister.config import load_config
from ister.format.frame import encode_frame, scan_frames
from ister.topic.express import Express
from ister.topic.log import Log
from tests.servers.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, rclone_server
from tests.support.builders import a_message, bincode_body, frames, with_bit_flipped
from tests.support.cases import each
from tests.support.commands import TOPIC, check_fields, run_json

COUNT = 20
FIELDS = {
    *("start_offset", "next_offset", "frames", "bytes", "codec", "damage"),
    *("publish_time_min", "publish_time_max"),
}
KEY = "storage/topics/default/orders/objects/data-0-19.dnb1"


def bodies(first, count, codec=Codec.BINCODE2):
    return [
        bincode_body(
            a_message(topic_offset=n, payload=b"%03d" % n * 50, publish_time=1000 + n), codec
        )
        for n in range(first, first + count)
    ]


@pytest.fixture
def path(tmp_path):
    """A whole object."""
    path = tmp_path / "data-0-19.dnb1"
    path.write_bytes(frames(0, bodies(0, COUNT)))
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A log with two topics and an object of the same name in each."""
    path = tmp_path_factory.mktemp("written") / "data"
    with Log(load_config(str(path)), background=False) as log:
        for name in (TOPIC, "/default/other"):
            topic = log.topic(name, create=True)
            topic.append_many([b"x"] * COUNT)
            topic.upload()
        log.topic(TOPIC).append(b"y")
        log.topic(TOPIC).upload()
    return path


def inspect(target, capsys, *options):
    """The exit code and the JSON that was printed."""
    code, printed = run_json(capsys, "inspect", "object", target, *options)
    assert printed.keys() >= FIELDS
    for bad in printed["damage"]:
        assert bad.keys() >= {"position", "offset", "reason"}
    return code, printed


def test_whole_object_shows_its_fields(path, capsys):
    for codec in list(Codec):
        path.write_bytes(frames(0, bodies(0, COUNT, codec)))
        code, printed = inspect(path, capsys)
        assert code == 0, codec
        check_fields(printed, start_offset=0, next_offset=COUNT, frames=COUNT, codec=codec, epoch=1)
        check_fields(printed, publish_time_min=1000, publish_time_max=1019, damage=[], errors=[])
        assert printed["bytes"] == path.stat().st_size
        assert "name_start" not in printed, codec


def flip(frame, byte):
    return lambda whole, at: with_bit_flipped(whole, 8 * (at[frame] + byte) + 2)


@each(
    ("harm", "left", "position", "offset"),
    [
        *((flip(frame, n), COUNT - 1, frame, frame) for frame in (0, 19) for n in (0, 9, 13, 40)),
        (lambda whole, at: whole + b"\0" * 50, COUNT, COUNT, COUNT),
        (lambda whole, at: whole + b"junk", COUNT, COUNT, COUNT),
        (lambda whole, at: whole[:-5], COUNT - 1, COUNT - 1, COUNT - 1),
        (lambda whole, at: whole[: at[7]], 7, 7, 7),
        (lambda whole, at: b"", 0, 0, 0),
    ],
)
def test_damage_is_listed_with_its_place(path, capsys, harm, left, position, offset):
    whole = frames(0, bodies(0, COUNT))
    starts = [*scan_frames(whole, expected_offset=None).starts, len(whole)]
    path.write_bytes(harm(whole, starts))
    code, printed = inspect(path, capsys)
    assert (code, printed["frames"]) == (1, left)
    assert [(d["position"], d["offset"]) for d in printed["damage"]] == [(starts[position], offset)]
    if left < COUNT - 1:  # cut between frames
        assert (printed["next_offset"], printed["damage"][0]["end_offset"]) == (left, COUNT)
        assert (printed["name_start"], printed["name_end"]) == (0, COUNT)


def test_frames_behind_what_the_name_says_are_damage(path, capsys):
    whole = path.read_bytes() + frames(COUNT, bodies(COUNT, 1))
    path.write_bytes(whole)
    code, printed = inspect(path, capsys)
    assert (code, [bad["position"] for bad in printed["damage"]]) == (1, [len(whole)])


def test_name_that_disagrees_with_the_frames_is_damage(path, tmp_path, capsys):
    renamed = tmp_path / "data-5-24-3.dnb1"
    path.rename(renamed)
    code, printed = inspect(renamed, capsys)
    assert code == 1
    assert (printed["start_offset"], printed["next_offset"], printed["frames"]) == (0, COUNT, COUNT)
    assert (printed["name_start"], printed["name_end"], printed["epoch"]) == (5, 25, 3)
    (bad,) = printed["damage"]
    assert "the name says 5" in bad["reason"]


def test_file_of_another_name_is_taken_as_it_is(path, tmp_path, capsys):
    renamed = tmp_path / "copy.bin"
    path.rename(renamed)
    code, printed = inspect(renamed, capsys)
    assert (code, printed["frames"], printed["epoch"]) == (0, COUNT, None)
    renamed.write_bytes(b"")
    code, printed = inspect(renamed, capsys)
    assert (code, printed["frames"], printed["start_offset"]) == (0, 0, None)
    renamed.write_bytes(b"no frames at all, and nothing to go by")
    code, printed = inspect(renamed, capsys)
    assert (code, printed["frames"]) == (1, 0)


def test_object_larger_than_a_chunk_is_read_whole(tmp_path, capsys):
    path = tmp_path / "data-0-2.dnb1"
    big = b"x" * (RECOVERY_CHUNK_BYTES + 1000)
    path.write_bytes(b"".join(encode_frame(offset, big) for offset in range(3)))
    code, printed = inspect(path, capsys)
    assert (code, printed["frames"], printed["undecodable"]) == (0, 3, 3)


def test_frames_are_listed_on_request_and_people_get_a_table(path, capsys):
    code, printed = inspect(path, capsys, "--frames", "--limit", "2", "--from", "4")
    assert (code, [line["offset"] for line in printed["frame_list"]]) == (0, [4, 5])
    assert main(["inspect", "object", str(path)]) == 0
    shown = capsys.readouterr()
    assert "bincode2" in shown.out
    assert "whole" in shown.out


def test_object_in_the_bucket_is_found_by_key_and_by_name(written, capsys):
    code, printed = inspect(KEY, capsys, "--data", written)
    assert (code, printed["frames"], printed["topic"]) == (0, COUNT, TOPIC)
    code, printed = inspect("data-20-20.dnb1", capsys, "--data", written)
    assert (code, printed["frames"], printed["topic"]) == (0, 1, TOPIC)
    url = printed["path"]
    assert url.startswith("fs:///")
    code, printed = inspect(url, capsys)
    assert (code, printed["frames"], printed["topic"]) == (0, 1, TOPIC)


def test_damaged_object_in_the_bucket_is_found_out(written, tmp_path, capsys):
    shutil.copytree(written, tmp_path / "data")
    path = tmp_path / "data" / "objects" / KEY
    path.write_bytes(with_bit_flipped(path.read_bytes(), 8 * 100))
    code, printed = inspect(KEY, capsys, "--data", tmp_path / "data")
    assert (code, printed["frames"], len(printed["damage"])) == (1, COUNT - 1, 1)
    assert main(["inspect", "object", KEY, "--data", str(tmp_path / "data")]) == 1
    shown = capsys.readouterr()
    assert "DAMAGED" in shown.out
    assert "damage: data-0-19.dnb1 position" in shown.out
    assert "the object is damaged" in shown.err


@pytest.fixture(scope="module")
def express(tmp_path_factory):
    """A log with two topics whose messages are in one express object; the object's path."""
    path = tmp_path_factory.mktemp("express") / "data"
    with Log(load_config(str(path)), background=False) as log:
        shared = Express(log.stores)
        for name in (TOPIC, "/default/other"):
            topic = log.topic(name, create=True, ack="tiered")
            shared.add(topic.bucket.uploads)
            topic.append_many([b"message"] * COUNT)
            topic.flush()
        shared.write_next()
    (found,) = path.rglob("*.dnbx")
    return found


def inspect_express(target, capsys, *options):
    return run_json(capsys, "inspect", "object", target, *options)


def test_express_object_is_shown_run_by_run(express, capsys):
    code, printed = inspect_express(express, capsys)
    assert (code, printed["format"], printed["frames"]) == (0, "express", 2 * COUNT)
    assert [
        (run["topic"], run["start_offset"], run["next_offset"], run["format"])
        for run in printed["runs"]
    ] == [(TOPIC, 0, COUNT, "express"), ("/default/other", 0, COUNT, "express")]
    assert main(["inspect", "object", str(express)]) == 0
    shown = capsys.readouterr().out
    assert "/default/other" in shown
    assert "whole" in shown


def test_run_in_the_bucket_is_found_by_the_name_in_its_descriptor(express, capsys):
    data = express.parents[5]
    with Log(load_config(str(data)), background=False) as log:
        run = log.topic(TOPIC).bucket.owned.last.object_id
    code, printed = inspect_express(run, capsys, "--data", data)
    assert (code, printed["frames"], printed["next_offset"]) == (0, COUNT, COUNT)
    code, printed = inspect_express(run.partition("@")[0], capsys, "--data", data)
    assert (code, len(printed["runs"])) == (0, 2)


def test_damaged_run_of_an_express_object_is_found_out(express, tmp_path, capsys):
    path = tmp_path / express.name
    data = express.read_bytes()
    path.write_bytes(data.replace(b"message", b"massage", 1))
    code, printed = inspect_express(path, capsys)
    assert code == 1
    assert [len(run["damage"]) for run in printed["runs"]] == [1, 0]
    path.write_bytes(data[:-1] + b"?")
    code, printed = inspect_express(path, capsys)
    assert (code, printed["errors"][0]["code"]) == (1, "DATA_LOSS")


@each(
    ("target", "code", "words"),
    [
        ("data-0-19.dnb1", "INVALID_ARGUMENT", KEY),  # in two topics
        ("data-7-8.dnb1", "NOT_FOUND", "no object 'data-7-8.dnb1'"),
        (KEY.replace("0-19", "0-18"), "NOT_FOUND", "not found"),
        ("ftp://host/key", "INVALID_ARGUMENT", "not the URL of an object"),
        ("s3://bucket", "INVALID_ARGUMENT", "not the URL of an object"),
        ("", "NOT_FOUND", "no object ''"),
    ],
)
def test_name_that_is_not_that_of_one_object_is_an_error(written, capsys, target, code, words):
    ended, printed = inspect_express(target, capsys, "--data", written)
    (error,) = printed["errors"]
    assert (ended, error["code"]) == (1, code)
    assert words.lower() in f"{error['message']} {error.get('hint')}".lower()


def test_missing_file_without_a_log_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ISTER_CONFIG", raising=False)
    assert main(["inspect", "object", "none.dnb1"]) == 1
    assert "file not found" in capsys.readouterr().err


def test_object_in_s3_is_read_by_url(path, tmp_path, monkeypatch, capsys):
    """Credentials come from the config's options, or from the environment without a config."""
    with rclone_server() as server:
        storage = {
            "wal": {"dir": str(tmp_path / "wal")},
            "cloud": {"backend": "s3", "root": f"s3://{BUCKET}/ister", "options": server.options()},
        }
        config = tmp_path / "ister.yml"
        config.write_text(yaml.safe_dump({"storage": storage}))
        with ister.open(config) as log:
            topic = log.topic(TOPIC, create=True)
            topic.append_many([b"x"] * COUNT)
            topic.upload()
        url = f"s3://{BUCKET}/ister/{KEY}"
        for target in (url, KEY, "data-0-19.dnb1"):
            code, printed = inspect(target, capsys, "--config", config)
            assert (code, printed["frames"], printed["topic"]) == (0, COUNT, TOPIC)
        for path in tmp_path.glob("metadata.db*"):
            path.unlink()
        code, printed = run_json(capsys, "recover", "--config", config)
        assert (code, printed["topics"][0]["messages"]) == (0, COUNT)
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("ISTER_CONFIG", raising=False)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        code, printed = inspect(url, capsys)
        assert (code, printed["frames"]) == (0, COUNT)
        assert main(["inspect", "object", f"{url}.none"]) == 1
        assert SECRET_KEY not in capsys.readouterr().err


def an_archive(path, *, kept=""):
    archive = pytest.importorskip("ister.format.archive_writer")
    decoder = archive.ColumnarDecoder(TOPIC, Codec.BINCODE2, archive.EVERY_FIELD)
    batch = decoder.decode(frames(0, bodies(0, COUNT)), expected_offset=0).batch
    with open(path, "wb") as file:
        writer = archive.ArchiveWriter(
            file, topic=TOPIC, codec=Codec.BINCODE2, row_group_bytes=1000
        )
        for at in range(0, COUNT, 5):
            writer.write(batch.slice(at, 4 if kept else 5))
        return writer.finish(start=0, end=COUNT, kept=kept)


@each("kept", ["", "latest-per-key"])
@each("name", ["data-0-19-c00000001.parquet", "copy.of.it"])
def test_parquet_object_shows_its_fields(tmp_path, capsys, kept, name):
    path = tmp_path / name
    an_archive(path, kept=kept)
    code, printed = inspect(path, capsys, "--frames", "--from", 6, "--limit", 2)
    assert code == 0
    check_fields(printed, start_offset=0, next_offset=COUNT, kept=kept, topic=TOPIC, damage=[])
    check_fields(printed, format="parquet", codec="bincode2", frames=16 if kept else COUNT)
    check_fields(printed, publish_time_min=1000, publish_time_max=1018 if kept else 1019)
    assert printed["bytes"] == path.stat().st_size
    assert [line["offset"] for line in printed["frame_list"]] == [6, 7]
    assert printed["frame_list"][0]["publish_time"] == 1006
    assert main(["inspect", "object", str(path)]) == 0
    out = capsys.readouterr().out
    assert "parquet" in out
    assert ("latest-per-key" in out) is bool(kept)


def test_damage_of_a_parquet_object_is_listed(tmp_path, capsys):
    path = tmp_path / "data-0-19-c00000001.parquet"
    written_archive = an_archive(path)
    whole = path.read_bytes()
    bad = written_archive.row_groups[1]
    path.write_bytes(with_bit_flipped(whole, 8 * (bad.position + 30)))
    code, printed = inspect(path, capsys)
    assert (code, printed["frames"]) == (1, COUNT - bad.rows)
    assert [
        (item["position"], item["offset"], item["end_offset"]) for item in printed["damage"]
    ] == [(bad.position, bad.first_offset, bad.next_offset)]
    path.write_bytes(whole[:-5])
    code, printed = inspect(path, capsys)
    assert (code, printed["frames"], len(printed["damage"])) == (1, 0, 1)
    other = tmp_path / "data-0-29-c00000001.parquet"
    other.write_bytes(whole)
    code, printed = inspect(other, capsys)
    assert code == 1
    assert (printed["name_start"], printed["name_end"]) == (0, 30)
