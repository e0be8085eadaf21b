"""The walk over frames: what is whole, which ranges are bad, and how it goes on behind them."""

from ister.base.limits import RECOVERY_CHUNK_BYTES
from ister.format.frame import Corrupt, encode_frame
from ister.format.frame_walk import FrameWalk
from tests.support.builders import with_bit_flipped, with_bytes_at
from tests.support.cases import each, product

FIRST, COUNT = 100, 12
FRAMES = [encode_frame(offset, b"%03d" % offset * 20) for offset in range(FIRST, FIRST + COUNT)]
AT = [sum(map(len, FRAMES[:number])) for number in range(COUNT + 1)]
WHOLE = b"".join(FRAMES)
END = FIRST + COUNT
CHUNKS = (64, 333, 1 << 20)
JUNK = b"\0" * (2 * RECOVERY_CHUNK_BYTES) + b"\xff" * 100_000


class Bytes:
    """Bytes as a file; `reads` is called after each read."""

    path = "bytes"

    def __init__(self, data, reads=lambda file: None):
        self.data, self._reads = data, reads

    def read_at(self, position, size):
        found = self.data[position : position + size]
        self._reads(self)
        return found

    def size(self):
        return len(self.data)


def walk(data, *, goes_on=True, **options):
    """The offsets of whole frames, and the bad ranges: offset and position, and where they end."""
    bad = []

    def note(found):
        behind = found.behind or (None, None)
        bad.append((found.offset, found.position, behind[1], behind[0]))
        return goes_on

    options = {"expected_offset": FIRST, **options}
    file = data if isinstance(data, Bytes) else Bytes(data)
    found = FrameWalk(file, on_damage=note, **options)
    offsets = []
    for chunk, position, scan in found:
        first = scan.next_offset - len(scan.starts)
        offsets += range(first, scan.next_offset)
        assert chunk[: scan.end] == file.data[position : position + scan.end]
    assert found.frames == len(offsets)
    return offsets, bad


def without(*numbers):
    return [FIRST + number for number in range(COUNT) if number not in numbers]


def at(number):
    """The place of a frame, as a bad range has it."""
    return FIRST + number, AT[number]


def _put(position, data):
    return with_bytes_at(WHOLE, position, data)


def _flip(position):
    return with_bit_flipped(WHOLE, 8 * position)


DAMAGE = {
    "none": (WHOLE, (), []),
    "a body": (_flip(AT[3] + 30), (3,), [at(3) + at(4)]),
    "the first": (_flip(30), (0,), [at(0) + at(1)]),
    "the last": (_flip(AT[11] + 30), (11,), [(*at(11), None, None)]),
    "neighbours": (_put(AT[5], b"\0" * (AT[7] - AT[5])), (5, 6), [at(5) + at(7)]),
    "cut out": (WHOLE[: AT[4]] + WHOLE[AT[9] :], range(4, 9), [(*at(4), FIRST + 9, AT[4])]),
    "two places": (
        with_bit_flipped(_put(AT[8], b"\xff" * 16), 8 * (AT[2] + 20)),
        (2, 8),
        [at(2) + at(3), at(8) + at(9)],
    ),
    "torn": (WHOLE[:-5], (11,), [(*at(11), None, None)]),
    "something behind": (WHOLE + b"junk", (), [(END, AT[12], None, None)]),
    **{
        f"byte {byte} of a header": (_flip(AT[5] + byte), (5,), [at(5) + at(6)])
        for byte in range(16)
    },
}


@each("kind, chunk_bytes", product(DAMAGE, CHUNKS))
def test_bad_ranges_are_passed_and_everything_else_is_found(kind, chunk_bytes):
    data, lost, bad = DAMAGE[kind]
    assert walk(data, chunk_bytes=chunk_bytes) == (without(*lost), bad)


def test_walk_stops_where_the_callback_says_so():
    data = _flip(AT[3] + 30)
    assert walk(data, goes_on=False) == (without(*range(3, COUNT)), [at(3) + at(4)])
    found = FrameWalk(Bytes(data), expected_offset=FIRST)
    assert sum(len(scan.starts) for _, _, scan in found) == 3
    assert isinstance(found.stop, Corrupt)
    assert (found.end, found.next_offset, found.is_clean) == (AT[3], FIRST + 3, False)
    assert "crc mismatch" in found.bad.reason


def test_damage_larger_than_a_search_window_is_passed():
    data = WHOLE[: AT[1]] + JUNK + WHOLE[AT[1] :]
    assert walk(data) == (without(), [(*at(1), FIRST + 1, AT[1] + len(JUNK))])


def test_frames_larger_than_a_chunk_are_whole_and_passed_when_damaged():
    data = b"".join(encode_frame(at, b"%d" % at * RECOVERY_CHUNK_BYTES) for at in (7, 8, 9))
    assert walk(data, expected_offset=7) == ([7, 8, 9], [])
    size = len(data) // 3
    damaged = with_bit_flipped(data, 8 * (size + 5000))
    assert walk(damaged, expected_offset=7) == ([7, 9], [(8, size, 9, 2 * size)])


def test_walk_ends_at_an_offset():
    end = FIRST + 5
    assert walk(WHOLE, end_offset=end) == (without(*range(5, COUNT)), [])
    short = walk(WHOLE[: AT[4]], end_offset=end)
    assert short == (without(*range(4, COUNT)), [(FIRST + 4, AT[4], None, None)])


def test_file_that_grows_meanwhile_is_walked_to_its_new_end():
    def grow(file):
        file.data = WHOLE[: len(file.data) + len(FRAMES[0])]

    assert walk(Bytes(WHOLE[:10], grow)) == (without(), [])


def test_offset_is_taken_from_the_first_frame_if_none_is_expected():
    assert walk(WHOLE, expected_offset=None) == (without(), [])
    assert walk(b"", expected_offset=None) == ([], [])
    assert walk(b"no frames here, of any kind", expected_offset=None)[0] == []
