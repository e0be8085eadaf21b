"""A clock that tests move."""


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, *, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic = 0.0
        self._suspended = 0.0

    def now_ns(self) -> int:
        """Nanoseconds since the Unix epoch, as set."""
        return self._now_ms * 1_000_000

    def monotonic(self) -> float:
        """Seconds advanced so far."""
        return self._monotonic

    def boottime(self) -> float:
        """Seconds advanced or suspended so far."""
        return self._monotonic + self._suspended

    def advance(self, seconds: float) -> None:
        """Moves all clocks forward."""
        self._monotonic += seconds
        self._now_ms += int(seconds * 1000)

    def sleep(self, seconds: float) -> None:
        """Moves all clocks forward; does not block."""
        self.advance(seconds)

    def suspend(self, seconds: float) -> None:
        """Moves all clocks except `monotonic` forward, as suspending the machine does."""
        self._suspended += seconds
        self._now_ms += int(seconds * 1000)

    def jump_wall(self, milliseconds: int) -> None:
        """Moves wall time alone, as an operator or a time server may."""
        self._now_ms += milliseconds
