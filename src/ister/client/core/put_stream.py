"""Flight's do_put as a stream of gRPC: batches go out, answers come in, and it can be cancelled.

pyarrow's own client has no way to end a call that hangs, and a thread of the program would hang
with it. What is sent is the same: Arrow's IPC messages, which pyarrow makes, in Flight's frame
(`ister.wire.flight_data`).

Belongs to one loop. Does not own: what is sent again after a failure (`sender`).
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Final, TypeVar

from ister.client.core.network import Network, Route
from ister.errors import CorruptDataError, InvalidRequestError
from ister.wire.contract import PutAck, PutBatch, PutOpen
from ister.wire.errors import carries_error, received_error
from ister.wire.flight_data import decode_fields, encode_data

if TYPE_CHECKING:
    import pyarrow as pa

_Result = TypeVar("_Result")

# A broker that does not respond within this time counts as unreachable.
_CHECK_SECONDS: Final = 5.0
_METHOD: Final = "/arrow.flight.protocol.FlightService/DoPut"


def decode_result(data: bytes) -> bytes:
    """The application metadata of a PutResult.

    Raises:
        CorruptDataError: It is something else.
    """
    try:
        return bytes(decode_fields(data).get(1, b""))
    except ValueError as error:
        raise CorruptDataError("the broker's answer is not a PutResult") from error


class PutStream:
    """One stream of rows to a topic."""

    def __init__(
        self, network: Network, route: Route, address: str, opened: PutOpen, schema: pa.Schema
    ) -> None:
        """Begins the call.

        `opened` names the topic and the producer; `schema` has the columns of all batches.
        """
        self._network = network
        self.route = route
        self._address = address
        self._topic = opened.topic
        self._schema = schema
        self._opening = encode_data(schema.serialize(), command=opened.to_json())
        self._is_over = False
        headers = network.headers(route)
        channel = network.channel_for_stream(address, "flight")
        self._call = channel.stream_stream(_METHOD)(metadata=headers)

    async def open(self) -> None:
        """Says what is going to come.

        Raises:
            IsterError: It could not be sent.
        """
        await self._answered(self._call.write(self._opening))

    async def write(self, batch: pa.RecordBatch, sequence: int) -> None:
        """Sends rows; returns when there is room for more.

        Raises:
            IsterError: The stream has failed; reading usually raises the cause.
        """
        data = encode_data(batch.serialize(), metadata=PutBatch(sequence=sequence).to_json())
        await self._answered(self._call.write(data))

    async def read(self) -> PutAck | None:
        """The next answer; None at the end.

        Raises:
            IsterError: The stream has failed, and why.
        """
        data = await self._answered(self._call.read())
        if not isinstance(data, bytes):
            return None  # gRPC's end of the stream
        answer = decode_result(data)
        text = answer.decode("utf-8", "replace")
        if carries_error(text):
            raise received_error(text)
        try:
            return PutAck.from_json(answer)
        except InvalidRequestError as error:
            raise CorruptDataError(f"the broker's answer is invalid: {error.message}") from error

    async def done(self) -> None:
        """Says that nothing more comes.

        Raises:
            IsterError: The stream has failed.
        """
        await self._answered(self._call.done_writing())

    async def check_broker(self) -> None:
        """Checks whether the broker responds, on its other port, and has the topic.

        Raises:
            IsterError: It does not.
        """
        await self._network.check_owner(self.route, self._topic, answer_within=_CHECK_SECONDS)

    async def _answered(self, waiting: Awaitable[_Result]) -> _Result:
        return await self._network.answered(waiting, self._address, self._topic)

    def cancel(self) -> None:
        """Ends it at once, wherever it is."""
        self._call.cancel()
        if not self._is_over:
            self._is_over = True
            self._network.stream_ended(self._address)
