"""Sending results: what is ready for one client leaves in one message per turn of the loop."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from dynbus.bus.errors import PayloadTooLarge
from dynbus.bus.protocol.wire import BATCH_OVERHEAD, MAX_FRAME_BYTES, Frame, encode_batch
from dynbus.bus.transport import ConnectionState

if TYPE_CHECKING:
    from dynbus.bus.bus import Bus
    from dynbus.bus.protocol.stream_writer import StreamWriter

    from .execution import Execution
    from .remote_client import RemoteClient

logger = logging.getLogger(__name__)

FRAME_OVERHEAD: Final = 48


class Outbox:
    """The clients of one instance that have something to get, and how it reaches them.

    Args:
        execution: whose load each batch tells.
    """

    def __init__(self, bus: Bus, instance_id: str, execution: Execution) -> None:
        self._bus = bus
        self._instance_id = instance_id
        self._execution = execution
        self._dirty: list[RemoteClient] = []
        self._flush_scheduled = False

    def __repr__(self) -> str:
        return f"<Outbox {self._instance_id} [{len(self._dirty)} clients]>"

    def max_unit_bytes(self) -> int:
        """Bytes of a unit that still fits into one message."""
        return min(MAX_FRAME_BYTES, self._bus.data.max_payload - 4 * BATCH_OVERHEAD)

    def schedule(self, client: RemoteClient) -> None:
        """Send what `client` has to get at the end of this turn of the loop."""
        self._dirty.append(client)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._bus.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send everything that is ready, now."""
        self._flush_scheduled = False
        clients, self._dirty = self._dirty, []
        for client in clients:
            try:
                self.flush_client(client)
            except Exception:
                # The other clients must get theirs; this one asks for what it misses.
                logger.exception("results for %s could not be sent", client.base)

    def flush_client(self, client: RemoteClient) -> None:
        """Send everything that is ready for one client, in as few messages as it fits."""
        writers, client.dirty = client.dirty, []
        client.ended = 0
        most = self._bus.data.max_payload - 3 * BATCH_OVERHEAD
        limit = room = min(MAX_FRAME_BYTES, most)
        frames: list[Frame] = []
        oversized: list[StreamWriter] = []
        for writer in writers:
            writer.dirty = False
            writer.count()
        if self._bus.data.state is not ConnectionState.CONNECTED:
            # It stays fresh, and follows when the connection is back.
            return
        for writer in writers:
            frame = writer.take_items(room) or writer.take_result(room)
            if frame is not None:
                frames.append(frame)
                room -= writer.taken_bytes + FRAME_OVERHEAD
                continue
            while writer.has_fresh:
                if writer.next_bytes > most:
                    oversized.append(writer)
                    break
                if frames and writer.next_bytes > room:
                    self._send(client, frames)
                    frames, room = [], limit
                frames += writer.take(room)
                room -= writer.taken_bytes + FRAME_OVERHEAD
        if frames:
            self._send(client, frames)
        for writer in oversized:
            self._give_up(client, writer)

    def _give_up(self, client: RemoteClient, writer: StreamWriter) -> None:
        """End a call whose next unit was cut for a server that took larger messages."""
        if writer.given_up:
            logger.error("not even the error of %r fits a message for %s", writer, client.base)
            return
        error = PayloadTooLarge(
            f"a piece of {writer.next_bytes} bytes of the answer fits no message any longer: the "
            f"server's limit shrank to max_payload = {self._bus.data.max_payload}; a new call is "
            "split for that"
        )
        call = client.calls.get(writer.number)
        if call is not None:
            call.reply.label(error)
        writer.give_up(error, self.max_unit_bytes())
        if call is not None and not call.ended:
            self._execution.abort(call, error)
        else:
            client.touch(writer)

    def encode(self, frames: list[Frame]) -> bytes:
        """Frames as a batch of this instance."""
        return encode_batch(self._instance_id, self._bus.incarnation, self._execution.load, frames)

    def _send(self, client: RemoteClient, frames: list[Frame]) -> None:
        self._bus.data.publish(client.frames_subject, self.encode(frames), reply=client.bounce)
