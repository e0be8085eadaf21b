"""Damages valid buffers of frames at random and checks what the decoders make of them.

    python -m tests.fuzz.mutate_frames --count 1000000 --seed 1

Each mutant has its own seed, made of the run's seed and its index, so a failure is replayed alone:
`--start INDEX --count 1`. What is checked, for both codecs:

- no exception but the documented `CorruptDataError`;
- frames before the first damaged byte are all found, at the expected offsets;
- a frame that is found holds a body that was written. The crc has 32 bits, so about one mutant in
  four billion may break this by chance. That the crc of each frame found really holds is checked
  with zlib, so a body that nobody wrote is such a collision, counted apart from the failures;
- scanning and decoding one by one find the same frames and stop at the same place for the same
  reason;
- a body that decodes is the only encoding of its message;
- no more frames than bytes allow, and, in a sample of the mutants, no more memory than a small
  multiple of the buffer.
"""

import argparse
import random
import struct
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field

from ister.base.limits import FRAME_BODY_BYTES_MAX
from ister.base.model import Codec, StreamMessage
from ister.format.frame import Corrupt, encode_frame
from ister.format.message import decode_message, encode_message
from tests.support.builders import VARINT_BOUNDARIES, a_message, frames
from tests.support.invariants import check_body, check_frames

_HEADER = struct.Struct("<QII")
_BASES_COUNT = 48
_MEMORY_SAMPLE_EVERY = 500
_MEMORY_BYTES_MAX = 256 * 1024
"""Above what any mutant needs (buffers are below 4 KiB), below what any bomb would take."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """A valid buffer, and what is known about it."""

    codec: Codec
    first_offset: int
    buffer: bytes
    starts: list[int]
    prefixes: list[bytes]
    """The buffer up to the end of each frame."""
    bodies: list[bytes]
    messages: dict[bytes, StreamMessage | None]
    """Every body that may be found in it; None for one inside of a payload that is no message."""


@dataclass(kw_only=True)
class Outcome:
    """What a run saw; without `frames_found` and `refused` on both sides it proves nothing."""

    mutants: int = 0
    frames_found: int = 0
    moved: int = 0
    """Whole bodies under another offset than their own: the header has no crc."""
    refused: dict[str, int] = field(default_factory=dict)
    bodies_decoded: int = 0
    collisions: list[str] = field(default_factory=list)
    memory_peak_bytes: int = 0


class MutantError(AssertionError):
    """A mutant broke a promise; the text has the command to replay it."""


def run(count: int, seed: int, *, start: int = 0) -> Outcome:
    """Checks mutants `start` up to `start + count` of the run `seed`.

    Raises:
        MutantError: With the seed and the command that replays the mutant.
    """
    outcome = Outcome()
    rng = random.Random(seed)
    bases = [_a_base(rng, list(Codec)[index % 2]) for index in range(_BASES_COUNT)]
    for index in range(start, start + count):
        rng.seed(seed << 40 | index)
        mutant = b""
        try:
            base = bases[int(rng.random() * _BASES_COUNT)]
            other = bases[int(rng.random() * _BASES_COUNT)]
            mutant = _mutated(rng, base, other)
            if index % _MEMORY_SAMPLE_EVERY == 0:
                _check_within_memory(rng, base, other, mutant, outcome)
            else:
                _check(rng, base, other, mutant, outcome)
        except Exception as error:
            raise MutantError(
                f"{type(error).__name__}: {error}\n"
                f"mutant {index} of seed {seed}: {mutant.hex()}\n"
                f"replay: python -m tests.fuzz.mutate_frames"
                f" --seed {seed} --start {index} --count 1"
            ) from error
        outcome.mutants += 1
    return outcome


def _a_base(rng: random.Random, codec: Codec) -> Base:
    first_offset = rng.choice([0, 1, 249, 65534, 2**32 - 2, rng.randrange(2**63), 2**64 - 8])
    messages: dict[bytes, StreamMessage | None] = {b"inner": None}
    bodies: list[bytes] = []
    for offset in range(first_offset, first_offset + rng.randint(1, 6)):
        payload = rng.choice(
            [
                b"",
                b"hi",
                bytes(rng.randrange(100)),
                rng.randbytes(rng.randrange(100)),
                rng.randbytes(260),
                # A payload that is itself the next frame: damage must not make the parser enter it
                # unseen.
                encode_frame(offset + 1, bodies[-1] if bodies else b"inner"),
            ]
        )
        optional = {"schema_id": 300, "schema_version": 2, "routing_key": "k1"}
        fields = rng.choice([{}, optional]) if codec is Codec.BINCODE2 else {}
        message = a_message(
            topic_offset=offset,
            payload=payload,
            publish_time=rng.choice(VARINT_BOUNDARIES),
            subscription_name=rng.choice([None, "", "größe"]),
            attributes={str(n): "v" * n for n in range(rng.randrange(4))},
            **fields,
        )
        body = encode_message(message, codec)
        bodies.append(body)
        messages[body] = message
    buffer = frames(first_offset, bodies)
    starts = [sum(16 + len(body) for body in bodies[:count]) for count in range(len(bodies))]
    return Base(
        codec=codec,
        first_offset=first_offset,
        buffer=buffer,
        starts=starts,
        prefixes=[buffer[:end] for end in [*starts[1:], len(buffer)]],
        bodies=bodies,
        messages=messages,
    )


# Mutations: each takes the bytes, and gives them back damaged in one way.


def _slice(rng: random.Random, data: bytearray, size_max: int = 64) -> tuple[int, int]:
    start = int(rng.random() * (len(data) + 1))
    return start, min(len(data), start + int(rng.random() * size_max))


def _flip_bit(rng: random.Random, data: bytearray, base: Base, other: Base) -> None:
    if data:
        data[int(rng.random() * len(data))] ^= 1 << int(rng.random() * 8)


def _overwrite(rng: random.Random, data: bytearray, base: Base, other: Base) -> None:
    start, end = _slice(rng, data, 12)
    data[start:end] = rng.randbytes(end - start)


def _truncate(rng: random.Random, data: bytearray, base: Base, other: Base) -> None:
    del data[int(rng.random() * (len(data) + 1)) :]


def _insert(rng: random.Random, data: bytearray, base: Base, other: Base) -> None:
    start, _ = _slice(rng, data)
    data[start:start] = rng.randbytes(1 + int(rng.random() * 20))


def _remove(rng: random.Random, data: bytearray, base: Base, other: Base) -> None:
    start, end = _slice(rng, data)
    del data[start:end]


def _duplicate(rng: random.Random, data: bytearray, base: Base, other: Base) -> None:
    start, end = _slice(rng, data, 200)
    data[end:end] = data[start:end]


def _duplicate_frame(rng: random.Random, data: bytearray, base: Base, other: Base) -> None:
    source, target = rng.choice(base.starts), rng.choice(base.starts)
    length = _HEADER.unpack_from(base.buffer, source)[1]
    data[target:target] = base.buffer[source : source + 16 + length]


def _zero_range(rng: random.Random, data: bytearray, base: Base, other: Base) -> None:
    start, end = _slice(rng, data)
    data[start:end] = bytes(end - start)


def _zero_tail(rng: random.Random, data: bytearray, base: Base, other: Base) -> None:
    start = int(rng.random() * (len(data) + 1))
    data[start:] = bytes(len(data) - start + int(rng.random() * 40))


def _splice(rng: random.Random, data: bytearray, base: Base, other: Base) -> None:
    source = other.buffer
    if rng.random() < 0.5:
        data[rng.choice(base.starts) :] = source[rng.choice(other.starts) :]
    else:
        data[int(rng.random() * (len(data) + 1)) :] = source[int(rng.random() * len(source)) :]


def _edit_length(rng: random.Random, data: bytearray, base: Base, other: Base) -> None:
    start = rng.choice(base.starts)
    if start + 16 <= len(data):
        _, length, _ = _HEADER.unpack_from(data, start)
        lengths = (0, 1, length - 1, length + 1, len(data) - start - 16, len(data), length << 8)
        limits = (FRAME_BODY_BYTES_MAX, FRAME_BODY_BYTES_MAX + 1, 2**31, 2**32 - 1)
        length = rng.choice(lengths + limits) % 2**32
        data[start + 8 : start + 12] = length.to_bytes(4, "little")


def _edit_offset(rng: random.Random, data: bytearray, base: Base, other: Base) -> None:
    start = rng.choice(base.starts)
    if start + 16 <= len(data):
        (offset, _, _) = _HEADER.unpack_from(data, start)
        offset = rng.choice((0, offset - 1, offset + 1, offset << 8, 2**64 - 1)) % 2**64
        data[start : start + 8] = offset.to_bytes(8, "little")


_MUTATIONS: list[Callable[[random.Random, bytearray, Base, Base], None]] = [
    _flip_bit,
    _flip_bit,
    _overwrite,
    _truncate,
    _insert,
    _remove,
    _duplicate,
    _duplicate_frame,
    _zero_range,
    _zero_tail,
    _splice,
    _edit_length,
    _edit_offset,
]


def _mutated(rng: random.Random, base: Base, other: Base) -> bytes:
    data = bytearray(base.buffer)
    for _ in range(1 + int(rng.random() ** 2 * 3)):
        _MUTATIONS[int(rng.random() * len(_MUTATIONS))](rng, data, base, other)
    return bytes(data)


# Checks.


def _check(rng: random.Random, base: Base, other: Base, mutant: bytes, outcome: Outcome) -> None:
    scan, found = check_frames(mutant, expected_offset=base.first_offset)
    intact = sum(map(mutant.startswith, base.prefixes))
    assert scan.starts[:intact] == base.starts[:intact], "lost a frame before the damage"
    assert len(found) <= len(mutant) // 17, "more frames than bytes allow"
    for frame in found:
        source = base if frame.body in base.messages else other
        if frame.body not in source.messages:
            outcome.collisions.append(f"{frame.body.hex()} of mutant {mutant.hex()}")
        elif (message := source.messages[frame.body]) is not None:
            assert decode_message(frame.body, source.codec) == message, "a whole body, misread"
            outcome.moved += message.msg_id.topic_offset != frame.offset
    outcome.frames_found += len(found)
    stop = scan.stop.reason.value if isinstance(scan.stop, Corrupt) else "need more"
    outcome.refused[stop] = outcome.refused.get(stop, 0) + 1
    # The crc keeps damage away from the decoders of bodies, so they get their own share of it.
    outcome.bodies_decoded += len(check_body(_damaged_body(rng, base, mutant)))


def _damaged_body(rng: random.Random, base: Base, mutant: bytes) -> bytes:
    """The bytes of a mutant that a reader without crc would take for a body, or a changed body."""
    if rng.random() < 0.25:
        start = rng.choice(base.starts) + 16
        return mutant[start : start + len(rng.choice(base.bodies))]
    body = bytearray(rng.choice(base.bodies))
    choice = rng.random()
    position = int(rng.random() * len(body))
    if choice < 0.5:
        body[position] ^= 1 << int(rng.random() * 8)
    elif choice < 0.7:
        body[position] = rng.choice((0, 1, 2, 0xFA, 0xFB, 0xFC, 0xFD, 0xFE, 0xFF))
    elif choice < 0.8:
        body[position : position + 8] = rng.choice(VARINT_BOUNDARIES).to_bytes(8, "little")
    elif choice < 0.9:
        body[position:position] = rng.randbytes(1 + int(rng.random() * 9))
    else:
        del body[position : position + 1 + int(rng.random() * 9)]
    return bytes(body)


def _check_within_memory(
    rng: random.Random, base: Base, other: Base, mutant: bytes, outcome: Outcome
) -> None:
    tracemalloc.start()
    try:
        _check(rng, base, other, mutant, outcome)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < _MEMORY_BYTES_MAX, f"{peak} bytes for a mutant of {len(mutant)}"
    outcome.memory_peak_bytes = max(outcome.memory_peak_bytes, peak)


def main() -> None:
    """Runs from the command line; exit status 1 and the replay command on failure."""
    parser = argparse.ArgumentParser(description="Damage frames at random, check the decoders.")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--start", type=int, default=0, help="index of the first mutant")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    try:
        outcome = run(arguments.count, arguments.seed, start=arguments.start)
    except MutantError as failure:
        sys.exit(str(failure))
    print(outcome)


if __name__ == "__main__":
    main()
