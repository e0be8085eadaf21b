"""The compiled scan gives exactly what the one in Python gives."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from ister import kernels
from ister.base.limits import COMPILE_AFTER_BYTES
from ister.format.frame import encode_frame, scan_frames

FIRST = 1_000


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    if not kernels.load():
        pytest.skip("numba is not installed: the extra `fast` is what is tested here")


def frames(rng: random.Random, count: int, *, size_max: int) -> bytes:
    return b"".join(
        encode_frame(FIRST + number, rng.randbytes(rng.randrange(1, size_max)))
        for number in range(count)
    )


def in_python(monkeypatch: pytest.MonkeyPatch, *args, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_current", None)
        return scan_frames(*args, **kwargs)


@pytest.mark.parametrize("size_max", [2, 40, 3000, 100_000])
def test_whole_frames_are_found_alike(monkeypatch: pytest.MonkeyPatch, size_max: int) -> None:
    data = frames(random.Random(size_max), max(4000 // size_max, 20) * 30, size_max=size_max)
    assert len(data) >= 16_384
    for end_offset in (None, FIRST, FIRST + 7, FIRST + 10**6):
        fast = scan_frames(data, expected_offset=FIRST, end_offset=end_offset)
        assert fast == in_python(monkeypatch, data, expected_offset=FIRST, end_offset=end_offset)
        assert end_offset == FIRST or fast.starts


def test_any_damage_stops_both_at_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 buffers, each with a flipped bit, a cut, a zeroed or a repeated stretch."""
    seed = 20_261
    rng = random.Random(seed)
    whole = frames(rng, 200, size_max=400)
    stops = set()
    for _ in range(2_000):
        data = bytearray(whole)
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[max(at, 20_000) :]
            case 2:
                data[at : at + 64] = bytes(len(data[at : at + 64]))
            case _:
                data[at:at] = data[at : at + rng.randrange(1, 64)]
        fast = scan_frames(bytes(data), expected_offset=FIRST)
        assert fast == in_python(monkeypatch, bytes(data), expected_offset=FIRST), seed
        stops.add(type(fast.stop).__name__ + str(getattr(fast.stop, "reason", "")))
    assert len(stops) >= 4


@pytest.mark.parametrize("first", [2**63 - 50, 2**63, 2**64 - 60])
def test_offsets_of_all_64_bits_are_scanned(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    data = b"".join(encode_frame(first + number, bytes(500)) for number in range(60))
    fast = scan_frames(data, expected_offset=first)
    assert fast == in_python(monkeypatch, data, expected_offset=first)
    assert len(fast.starts) == 60


def test_it_is_loaded_by_itself_after_many_bytes_and_not_before() -> None:
    """In a process of its own: a few scans load nothing, many do."""
    script = f"""
import sys
from ister import kernels
from ister.format.frame import encode_frame, scan_frames
data = b"".join(encode_frame(n, bytes(1000)) for n in range(1000))
scan_frames(data, expected_offset=0)
assert "numba" not in sys.modules
for _ in range({COMPILE_AFTER_BYTES} // len(data) + 1):
    scan_frames(data, expected_offset=0)
assert kernels._loading is not None
assert kernels.load()
assert len(scan_frames(data, expected_offset=0).starts) == 1000
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=180)
