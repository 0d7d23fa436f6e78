"""How a newcomer gets the state of a run: one worker, its donor, sends it in the background.

Over one connection the donor sends a `Snapshot`, then a `Record` of each unit that completes, and
the `Settings` of each step. When the newcomer has taken all of that in, it says so; the donor
proposes a view with it, and sends `Start` in front of the first unit that the newcomer takes part
in.
"""

from __future__ import annotations

import io
import logging
import queue
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from laconic.errors import LinkError
from laconic.links import secured
from laconic.links.calls import Call
from laconic.links.elastic.relay_frames import (
    KINDS,
    Frame,
    Refusal,
    Snapshot,
    Start,
)
from laconic.links.elastic.units import Units
from laconic.links.elastic.view import Member

log = logging.getLogger("laconic")

PURPOSE = b"join"
LOOK_SECONDS = 0.05
"""How often a worker that may end looks whether all was sent."""
MOST_WAITING = 2**26
"""How many bytes more than two snapshots may wait to be sent to a newcomer."""
_HEAD = struct.Struct(">QI")
"""A frame's length, and the checksum (CRC-32) of the frame."""
_CHECK = struct.Struct(">I")
"""The checksum of the head."""
CHANGED = "the message was changed in transit: its checksum is wrong"
READY, STATE = b"ready", b"state"
SHARE = 0.1
"""The share of the time in which a donor sends although its own rounds need the network."""
PIECE = 2**16
"""How many bytes are sent at a time, and how many more the kernel accepts before it sends them."""


class RelayError(RuntimeError):
    """The connection between a donor and its newcomer has ended."""


class Stream:
    """Frames over a connected socket."""

    most_waiting: float = MOST_WAITING
    """How many bytes more than two snapshots may have come and not be taken in."""

    def __init__(self, connection: secured.Stream) -> None:
        self._connection = connection
        self.moved = time.monotonic()
        """When bytes came last."""

    def send(
        self, frame: Frame, turn: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Send ``frame``, each piece in its ``turn()``; raises `RelayError`."""
        kind, values = type(frame).__name__, dict(vars(frame))
        if "call" in values:
            values["call"] = list(values["call"])
        buffer = io.BytesIO()
        torch.save({"kind": kind, **values}, buffer)
        data = buffer.getbuffer()
        head = _HEAD.pack(len(data), zlib.crc32(data))
        self.say(head + _CHECK.pack(zlib.crc32(head)))
        for start in range(0, len(data), PIECE):
            with turn():
                self.say(data[start : start + PIECE])

    def receive(self) -> Frame:
        """Wait for the next frame; raises `RelayError`."""
        head = self._exactly(_HEAD.size).read()
        if self._exactly(_CHECK.size).read() != _CHECK.pack(zlib.crc32(head)):
            raise RelayError(CHANGED)
        length, checksum = _HEAD.unpack(head)
        data = self._exactly(length)
        if zlib.crc32(data.getbuffer()) != checksum:
            raise RelayError(CHANGED)
        try:
            values: dict[str, Any] = torch.load(data, weights_only=True)
            cls = KINDS[values.pop("kind")]
            if "call" in values:
                values["call"] = Call(*values["call"])
            frame: Frame = cls(**values)
        except Exception as error:  # torch.load raises anything
            raise RelayError("what came is no frame of laconic's") from error
        return frame

    def _exactly(self, length: int) -> io.BytesIO:
        data = io.BytesIO()  # it grows with what comes: a false length takes no memory
        while (left := length - data.tell()) > 0:
            try:
                piece = self._connection.recv(min(left, PIECE))
            except OSError as error:
                raise RelayError(str(error)) from error
            if not piece:
                raise RelayError("the other worker has closed the connection")
            data.write(piece)
            self.moved = time.monotonic()
        data.seek(0)
        return data

    def say(self, data: bytes | memoryview) -> None:
        """Send a piece of a frame; or tell the donor `READY`: all of its frames so far were taken
        in; or `STATE`: send the state again, as of `Start`. Raises `RelayError`."""
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise RelayError(str(error)) from error

    def wait_for(self, word: bytes) -> None:
        """Wait for `say`; raises `RelayError`."""
        if self._exactly(len(word)).read() != word:
            raise RelayError("the newcomer violates the protocol")

    def close(self) -> None:
        """End the connection. Threads that use it raise `RelayError`."""
        self._connection.close()


class Relay:
    """Sends the frames for one newcomer, from a thread of its own, while the donor does no
    ``units``. ``ready``: called when the newcomer has taken in what was sent."""

    def __init__(
        self, newcomer: Member, stream: Stream, ready: Callable[[Member], None], units: Units
    ) -> None:
        self.newcomer = newcomer
        self.ended = False
        self._stream, self._ready, self._units = stream, ready, units
        self._hurries = False
        """Whether it sends all the time."""
        self._latest = 0.0
        """How many seconds the latest piece took to send."""
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._state: Callable[[], Snapshot] | None = None
        self._lock = threading.Lock()
        self._size = self._waiting = 0
        """How many bytes the snapshot has, and how many wait to be sent."""
        self._threads: list[threading.Thread] = []

    def begin(self, snapshot: Snapshot) -> None:
        """Send the ``snapshot`` first."""
        self._size = size_of(vars(snapshot))
        self.put(snapshot)
        for work in (self._send, self._listen):
            thread = threading.Thread(target=work, daemon=True, name="laconic-relay")
            self._threads.append(thread)
            thread.start()

    def end(self, until: float) -> None:
        """End the threads, and wait for that until the time ``until``."""
        self.give_up("this worker ends")
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))

    def put(self, frame: Frame) -> None:
        """Send ``frame`` after those before. A newcomer that takes in too little is given up. If
        more bytes than twice the snapshot's wait to be sent, units leave too little bandwidth, and
        this relay no longer yields to them."""
        self._add(size_of(vars(frame)))
        if self._waiting > 2 * self._size:
            self._hurry()
        if self._waiting > MOST_WAITING + 2 * self._size:
            self.give_up("it takes in less than the workers exchange")
        else:
            self._frames.put(frame)

    def _add(self, length: int) -> None:
        with self._lock:
            self._waiting += length

    def flush(self, seconds: float) -> None:
        """Wait until all frames so far are sent, at most so many ``seconds``: this worker may
        end."""
        end = time.monotonic() + seconds
        while self._waiting and not self.ended and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)

    def refuse(self, why: str) -> None:
        """Tell the newcomer that it cannot take part, and end the connection."""
        self.put(Refusal(why))
        self._frames.put(None)
        self.ended = True

    def give_up(self, why: str) -> None:
        """End the connection: the newcomer asks for a newer state."""
        self._state = None
        if not self.ended:
            log.info("a newcomer is not taken in: %s", why)
        self.ended = True
        self._frames.put(None)
        self._stream.close()

    def finish(self, start: Start, state: Callable[[], Snapshot] | None) -> None:
        """Send ``start``, the last frame, and ``state()`` after it if the newcomer asks for it. The
        unit under way waits for that."""
        self._state = state
        self._hurry()
        self.put(start)
        self._frames.put(None)
        self.ended = True

    def _hurry(self) -> None:
        with self._units.changed:
            self._hurries = True
            self._units.changed.notify_all()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """A context in which to send a piece: while no unit is under way, since both would share
        the network. During a unit this relay sends `SHARE` of the time, so that it comes to an end
        where units follow each other without a pause."""
        units = self._units
        with units.changed:
            units.changed.wait_for(
                lambda: self._hurries or not units.under_way, self._latest * (1 / SHARE - 1)
            )
        begin = time.monotonic()
        yield
        self._latest = time.monotonic() - begin

    def _send(self) -> None:
        try:
            while (frame := self._frames.get()) is not None:
                self._stream.send(frame, self._turn)
                self._add(-size_of(vars(frame)))
        except RelayError as error:
            self.give_up(str(error))

    def _listen(self) -> None:
        try:
            self._stream.wait_for(READY)
            try:
                self._ready(self.newcomer)
            except LinkError as error:
                self.refuse(str(error))
            self._stream.wait_for(STATE)  # or the newcomer closes
            state = self._state
            if state is not None:
                self._stream.send(state())
            self._stream.wait_for(STATE)  # the newcomer closes
        except RelayError as error:
            self.give_up(str(error))
        except Exception:  # of the user's modules, in `state`: the others must not wait for it
            log.exception("the state of this worker cannot be read")
            self.give_up("its state cannot be read")


def numbers_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The numbers, also those in a tensor, and tuples of numbers, in an optimizer's parameter
    groups, such as learning rates."""
    plain = [
        {k: v.item() if isinstance(v, Tensor) and v.dim() == 0 else v for k, v in group.items()}
        for group in groups
    ]
    return [
        {
            name: value
            for name, value in group.items()
            if _is_number(value)
            or (isinstance(value, tuple) and value and all(map(_is_number, value)))
        }
        for group in plain
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def size_of(value: Any) -> int:
    """The bytes of all tensors in ``value``."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    return sum(map(size_of, value)) if isinstance(value, (list, tuple)) else 0
