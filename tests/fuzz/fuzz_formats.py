"""Coverage-guided fuzzing of every decoder, with atheris.

    python -m tests.fuzz.fuzz_formats -atheris_runs=200000 [corpus directory]

The first byte of an input chooses the decoder, the rest is what it gets. Half of the choices set
the crcs right first, so that the fuzzer gets past them. Without a corpus directory a small one is
made of valid files, used, and removed again; an input that fails is kept, and its path printed. To
replay it, pass its path instead of a directory.
"""

import itertools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("atheris is not installed: pip install 'ister[fuzz]' (it has wheels for Linux only)")

with atheris.instrument_imports(include=["ister.format"]):
    from ister.base.model import Codec
    from ister.errors import UnsupportedVersionError
    from ister.format.bincode import BincodeError
    from ister.format.checkpoint import (
        decode_uploader_body,
        decode_uploader_checkpoint,
        decode_wal_body,
        decode_wal_checkpoint,
        encode_uploader_body,
        encode_uploader_checkpoint,
        encode_wal_body,
    )
    from ister.format.frame import FRAME_HEADER_SIZE, find_frame
    from ister.format.message import encode_message
    from ister.format.sparse_index import INDEX_ENTRY_SIZE, decode_index, encode_index
    from tests.support.builders import a_message, frames, golden, with_valid_crc
    from tests.support.invariants import check_body, check_frames


def fuzz_frames(data: bytes) -> None:
    """Frames one after the other, with and without an expected offset."""
    check_frames(data, expected_offset=None)
    check_frames(data, expected_offset=7)
    found = find_frame(data, 0, offset_min=0, offset_max=2**64)
    if found is not None:
        check_frames(data[found[0] :], expected_offset=found[1])


def fuzz_frames_with_crcs(data: bytes) -> None:
    """The same, with the crc of each frame set right as far as the lengths lead."""
    buffer = bytearray(data)
    start = 0
    while start + FRAME_HEADER_SIZE <= len(buffer):
        length = int.from_bytes(buffer[start + 8 : start + 12], "little")
        end = start + FRAME_HEADER_SIZE + length
        if end > len(buffer):
            break
        crc = with_valid_crc(bytes(buffer[start + FRAME_HEADER_SIZE : end]))[-4:]
        buffer[start + 12 : start + 16] = crc
        start = end
    fuzz_frames(bytes(buffer))


def fuzz_message(data: bytes) -> None:
    """A body in either codec."""
    check_body(data)


def fuzz_checkpoint_bodies(data: bytes) -> None:
    """Danube's checkpoints in either codec: refused, or the only encoding of what they say."""
    for codec in Codec:
        for decode, encode in (
            (decode_wal_body, encode_wal_body),
            (decode_uploader_body, encode_uploader_body),
        ):
            try:
                checkpoint = decode(data, codec)
            except BincodeError:
                continue
            assert encode(checkpoint, codec) == data, "a second encoding of a checkpoint"


def fuzz_checkpoint(data: bytes) -> None:
    """Checkpoint files as they are."""
    try:
        decode_wal_checkpoint(data)
        uploader = decode_uploader_checkpoint(data)
    except UnsupportedVersionError:
        assert data[:4] == b"ISTC", "a version of something else"
        assert data[4] > 1, "a newer version that is not newer"
    else:
        # Reserved bits and the extra part are free for later versions of the same format.
        if uploader is not None and data[6:8] == bytes(2) and data[12:16] == bytes(4):
            assert encode_uploader_checkpoint(uploader) == data, "a second encoding of a checkpoint"


def fuzz_checkpoint_with_crc(data: bytes) -> None:
    """The same, with the crc set right."""
    fuzz_checkpoint(with_valid_crc(data[:-4]))


def fuzz_index(data: bytes) -> None:
    """An index: what is read are its first bytes, and ascends."""
    entries = decode_index(data)
    assert encode_index(entries) == data[: len(entries) * INDEX_ENTRY_SIZE], "entries not there"
    for before, behind in itertools.pairwise(entries):
        assert before.offset < behind.offset, "offsets do not ascend"
        assert before.position < behind.position, "positions do not ascend"


def fuzz_index_with_crcs(data: bytes) -> None:
    """The same, with the crc of each entry set right."""
    starts = range(0, len(data), INDEX_ENTRY_SIZE)
    entries = (data[start : start + INDEX_ENTRY_SIZE] for start in starts)
    fuzz_index(b"".join(with_valid_crc(entry[:-4]) for entry in entries))


TARGETS = (
    fuzz_frames,
    fuzz_frames_with_crcs,
    fuzz_message,
    fuzz_checkpoint_bodies,
    fuzz_checkpoint,
    fuzz_checkpoint_with_crc,
    fuzz_index,
    fuzz_index_with_crcs,
)


def test_one_input(data: bytes) -> None:
    """One run of the fuzzer."""
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:])


def write_seed_corpus(directory: Path) -> None:
    """Valid inputs for every target, for the fuzzer to start from."""
    bodies = [encode_message(a_message(topic_offset=7), codec) for codec in Codec]
    checkpoints = [golden("wal_checkpoint"), golden("uploader_checkpoint")]
    inputs = {
        fuzz_frames: [frames(7, bodies), frames(7, [b"x", b"yy"])],
        fuzz_message: [*bodies, golden("bincode2_frame")[FRAME_HEADER_SIZE:]],
        fuzz_checkpoint_bodies: [
            golden("bincode1_wal_checkpoint_body"),
            golden("bincode2_wal_checkpoint_body"),
            checkpoints[1][16:-4],
        ],
        fuzz_checkpoint: checkpoints,
        fuzz_index: [golden("sparse_index")],
    }
    inputs[fuzz_frames_with_crcs] = inputs[fuzz_frames]
    inputs[fuzz_checkpoint_with_crc] = inputs[fuzz_checkpoint]
    inputs[fuzz_index_with_crcs] = inputs[fuzz_index]
    for selector, target in enumerate(TARGETS):
        for index, data in enumerate(inputs[target]):
            (directory / f"{target.__name__}-{index}").write_bytes(bytes([selector]) + data)


def run_with_own_corpus(arguments: list[str]) -> int:
    """Runs this script again with a corpus made for it, and tidies up behind it.

    Another process, because libFuzzer leaves it at a failure without any Python code run.
    """
    directory = Path(tempfile.mkdtemp(prefix="ister-fuzz-"))
    corpus = directory / "corpus"
    try:
        corpus.mkdir()
        write_seed_corpus(corpus)
        status = subprocess.run(
            [sys.executable, __file__, *arguments, f"-artifact_prefix={directory}/", str(corpus)],
            check=False,
        ).returncode
    finally:
        shutil.rmtree(corpus, ignore_errors=True)
        failed = sorted(directory.iterdir())
        if not failed:
            directory.rmdir()
    for path in failed:
        print(f"replay: python -m tests.fuzz.fuzz_formats {path}")
    return status


def main() -> None:
    """Fuzzes with the corpus given, or with its own."""
    if all(argument.startswith("-") for argument in sys.argv[1:]):
        sys.exit(run_with_own_corpus(sys.argv[1:]))
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
