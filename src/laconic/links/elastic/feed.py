"""What a newcomer receives from its donor."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from laconic.links.calls import Call
from laconic.links.elastic.relay import (
    Frame,
    Record,
    RelayError,
    Snapshot,
    Start,
    StepSettings,
)


class Frames(Protocol):
    """A connection to a donor, as `laconic.links.elastic.relay.Stream`."""

    def receive(self) -> Frame:
        """Wait for the next frame; raises `RelayError`."""

    def say_ready(self) -> None:
        """Tell the donor that all of its frames so far were taken in."""

    def close(self) -> None:
        """End the connection."""


class Feed:
    """The frames of one donor, read by a thread, and taken by the engine in their order.
    ``awake()`` is called by the thread that waits for a frame after `wake`. ``donor``: its id."""

    def __init__(self, stream: Frames, donor: str, awake: Callable[[], None]) -> None:
        self._stream, self.donor, self._awake = stream, donor, awake
        self.first_step = 0
        """After which step the donor has begun to send its state."""
        self._frames: deque[Frame | RelayError] = deque()
        self._changed, self._woken = threading.Condition(), False
        self._seen: list[Frame] = []
        self.settings: dict[int, list[dict[str, float]]] = {}
        threading.Thread(target=self._read, daemon=True, name="laconic-feed").start()

    def _read(self) -> None:
        try:
            while True:
                frame = self._stream.receive()
                self._put(frame)
                if isinstance(frame, Start):
                    return
        except RelayError as error:
            self._put(error)

    def _put(self, frame: Frame | RelayError) -> None:
        with self._changed:
            self._frames.append(frame)
            self._changed.notify()

    def wake(self) -> None:
        """Let the thread that waits look around."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def _next(self) -> Frame | RelayError:
        while True:
            with self._changed:
                while not self._frames and not self._woken:
                    self._changed.wait()
                if self._frames:
                    return self._frames.popleft()
                self._woken = False
            self._awake()

    def idle(self) -> bool:
        """Whether all frames that have come were taken."""
        return not self._seen and not self._frames

    def wait(self) -> None:
        """Take in the next frame."""
        frame = self._next()
        if isinstance(frame, RelayError):
            raise frame
        if isinstance(frame, StepSettings):
            self.settings[frame.step] = frame.groups
        else:
            self._seen.append(frame)

    def peek(self) -> Frame:
        """The next frame that is no settings."""
        while not self._seen:
            self.wait()
        return self._seen[0]

    def pop(self) -> Frame:
        """Take that frame."""
        frame = self.peek()
        self._seen.pop(0)
        if isinstance(frame, Snapshot):
            self.first_step = self.first_step or frame.step
        return frame

    def say_ready(self) -> None:
        """Tell the donor that all of its frames so far were taken in."""
        self._stream.say_ready()

    def close(self) -> None:
        """End the connection."""
        self._stream.close()

    def record(self, call: Call) -> Record:
        """The next unit of ``call``."""
        while True:
            frame = self.peek()
            if not isinstance(frame, Record):
                raise RelayError(f"the donor has sent nothing for {call}")
            self.pop()
            if frame.call[:2] == call[:2]:
                return frame
