"""The outbox of results: what is ready for one client leaves in one message per turn of the
loop, with the load of the instance.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from dynbus.bus.errors import PayloadTooLarge
from dynbus.bus.protocol.wire import BATCH_OVERHEAD, MAX_FRAME_BYTES, Frame, encode_batch
from dynbus.bus.transport import ConnectionState

if TYPE_CHECKING:
    from dynbus.bus.bus import Bus
    from dynbus.bus.protocol.stream_writer import StreamWriter

logger = logging.getLogger(__name__)

FRAME_OVERHEAD: Final = 48
EARLY_ENDS: Final = 16


class ClientOutbox:
    """The frames that are ready for one client.

    Attributes:
        key: what the client is known by.
        base: its reply base.
        bounce: where the server says that nobody reads the results.
        dirty: writers with something to send.
        ends: how many of those have ended.
    """

    __slots__ = ("_outbox", "base", "bounce", "dirty", "ends", "frames_subject", "key")

    def __init__(self, outbox: Outbox, key: str, base: str, bounce: str) -> None:
        self._outbox = outbox
        self.key = key
        self.base = base
        self.frames_subject = f"{base}.f"
        self.bounce = bounce
        self.dirty: list[StreamWriter] = []
        self.ends = 0

    def __repr__(self) -> str:
        return f"<ClientOutbox {self.base} [{len(self.dirty)} streams]>"

    def note_dirty(self, writer: StreamWriter) -> None:
        """A writer has something to send."""
        if not self.dirty:
            self._outbox.schedule(self)
        self.dirty.append(writer)

    def touch(self, writer: StreamWriter) -> None:
        """Have a writer's fresh units sent at the end of this turn of the loop."""
        if not writer.dirty:
            writer.dirty = True
            self.note_dirty(writer)

    def touch_ended(self, writer: StreamWriter) -> None:
        """Have the units of a writer that has ended sent at the end of this turn, or sooner.

        Its caller has nothing to do until it hears so: a busy turn of the loop does not make
        many of them wait for the last.
        """
        if not writer.dirty:
            writer.dirty = True
            self.note_dirty(writer)
        self.ends += 1
        if self.ends >= EARLY_ENDS:
            self._outbox.flush_client(self)


class Outbox:
    """The clients of one instance that have something to get, and how it reaches them.

    Args:
        load: the calls that run or wait; each batch tells it.
        does_not_fit: told of a writer whose next unit no message can carry any longer, and of the
            error that is to end its call.
    """

    def __init__(
        self,
        bus: Bus,
        instance_id: str,
        load: Callable[[], int],
        does_not_fit: Callable[[ClientOutbox, StreamWriter, PayloadTooLarge], object],
    ) -> None:
        self._bus = bus
        self._instance_id = instance_id
        self._load = load
        self._does_not_fit = does_not_fit
        self._dirty: list[ClientOutbox] = []
        self._flush_scheduled = False

    def __repr__(self) -> str:
        return f"<Outbox {self._instance_id} [{len(self._dirty)} clients]>"

    def max_unit_bytes(self) -> int:
        """Bytes of a unit that still fits into one message."""
        most = self._bus.data.max_payload - 4 * BATCH_OVERHEAD
        return most if most < MAX_FRAME_BYTES else MAX_FRAME_BYTES

    def schedule(self, client: ClientOutbox) -> None:
        """Send what `client` has to get at the end of this turn of the loop."""
        self._dirty.append(client)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._bus.data.before_sending(self.flush)

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

    def flush_client(self, client: ClientOutbox) -> None:
        """Send everything that is ready for one client, in as few messages as it fits."""
        writers, client.dirty = client.dirty, []
        client.ends = 0
        data = self._bus.data
        most = data.max_payload - 3 * BATCH_OVERHEAD
        limit = room = most if most < MAX_FRAME_BYTES else MAX_FRAME_BYTES
        frames: list[Frame] = []
        oversized: list[StreamWriter] = []
        if data.state is not ConnectionState.CONNECTED:
            for writer in writers:
                # It stays fresh, and follows when the connection is back.
                writer.dirty = False
                writer.count_pushed()
            return
        for writer in writers:
            writer.dirty = False
            frame = writer.take_result(room) if writer.ended else writer.take_items(room)
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
                frames += writer.take_frames(room)
                room -= writer.taken_bytes + FRAME_OVERHEAD
        if frames:
            self._send(client, frames)
        for writer in oversized:
            self._give_up(client, writer)

    def _give_up(self, client: ClientOutbox, writer: StreamWriter) -> None:
        """End a call whose next unit was cut for a server that took larger messages."""
        if writer.given_up:
            logger.error("not even the error of %r fits a message for %s", writer, client.base)
            return
        error = PayloadTooLarge(
            f"a piece of {writer.next_bytes} bytes of the answer fits no message any longer: the "
            f"server's limit shrank to max_payload = {self._bus.data.max_payload}; a new call is "
            "split for that"
        )
        self._does_not_fit(client, writer, error)

    def encode(self, frames: list[Frame]) -> bytes:
        """Frames as a batch of this instance."""
        return encode_batch(self._instance_id, self._bus.incarnation, self._load(), frames)

    def _send(self, client: ClientOutbox, frames: list[Frame]) -> None:
        self._bus.data.publish(client.frames_subject, self.encode(frames), reply=client.bounce)
