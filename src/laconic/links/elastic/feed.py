"""What a newcomer receives from its donor."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from laconic.errors import LinkError
from laconic.links.calls import Call
from laconic.links.elastic.relay import READY, STATE, RelayError, Stream, size_of
from laconic.links.elastic.relay_frames import Frame, Record, Refusal, Snapshot, Start, StepSettings

T = TypeVar("T")
CHECK_SECONDS = 0.02
"""The seconds after which a thread that waits for a frame checks its donor and the views. The
members of a view may wait for it meanwhile."""


class Feed:
    """The frames of one donor, read by a thread, and taken by the engine in their order.
    ``donor``: its id. The thread that waits for a frame calls ``check()`` now and then, which
    raises `RelayError` if the donor is lost."""

    def __init__(self, stream: Stream, donor: str, check: Callable[[], None]) -> None:
        self._stream, self.donor, self._check = stream, donor, check
        self.first_step = 0
        """After which step the donor has begun to send its state."""
        self._frames: deque[Frame] = deque()
        """Those that have come and were not taken, but for settings."""
        self._settings: dict[int, list[dict[str, Any]]] = {}
        """By the number of steps before the one that begins with them."""
        self._end: RelayError | LinkError | None = None
        """Why nothing more will come."""
        self._changed = threading.Condition()
        self._waiting = 0
        """How many bytes have come and were not taken."""
        self._limit: float = math.inf
        self._thread = threading.Thread(target=self._read, daemon=True, name="laconic-feed")
        self._thread.start()

    def _read(self) -> None:
        try:
            while self._waiting <= self._limit:
                self._put(self._stream.receive())
            self._stream.close()
            with self._changed:
                self._frames.clear()  # they would take memory only
            raise RelayError("this worker falls behind, and needs a newer state")
        except (RelayError, LinkError) as error:
            with self._changed:
                self._end = error
                self._changed.notify()

    def _put(self, frame: Frame) -> None:
        if isinstance(frame, Refusal):
            raise LinkError(f"the run does not take in this worker: {frame.why}")
        with self._changed:
            if isinstance(frame, StepSettings):
                self._settings[frame.step] = frame.groups
            else:
                self._waiting += size_of(vars(frame))
                self._frames.append(frame)
            if isinstance(frame, Snapshot):
                self._limit = self._stream.most_waiting + 2 * size_of(frame.state)
            self._changed.notify()

    def _take(
        self, come: Callable[[], bool], take: Callable[[], T], patience: float = math.inf
    ) -> T:
        """``take()`` once ``come()``. Raises why that cannot be any more, and `RelayError` if
        nothing comes for ``patience`` seconds."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: come() or self._end is not None, CHECK_SECONDS)
                if come():
                    return take()
                if self._end is not None:
                    raise self._end
            if time.monotonic() - self._stream.moved >= patience:
                raise RelayError("it takes no steps: it has finished, or waits for others")
            self._check()

    @property
    def waiting(self) -> int:
        """How many frames have come and were not taken, but for settings."""
        return len(self._frames)

    def idle(self) -> bool:
        """Whether all frames that have come were taken, and others may come."""
        return not self._frames and self._end is None

    def settings_of(self, step: int) -> list[dict[str, Any]]:
        """The settings of the step after ``step`` steps. Raises `RelayError` if they do not come
        before `Start`."""
        settings = self._take(
            lambda: step in self._settings or any(isinstance(f, Start) for f in self._frames),
            lambda: self._settings.pop(step, None),
        )
        if settings is None:
            raise RelayError("the other worker has taken other steps than this one repeats")
        return settings

    def peek(self) -> Frame:
        """The next frame that is no settings."""
        return self._take(lambda: bool(self._frames), lambda: self._frames[0])

    def pop(self, patience: float = math.inf) -> Frame:
        """Take that frame. Raises `RelayError` if nothing comes for ``patience`` seconds."""
        frame = self._take(lambda: bool(self._frames), self._frames.popleft, patience)
        with self._changed:
            self._waiting -= size_of(vars(frame))
        if isinstance(frame, Snapshot):
            self.first_step = self.first_step or frame.step
        return frame

    def say_ready(self) -> None:
        """Tell the donor that all of its frames so far were taken in."""
        self._stream.say(READY)

    def ask_for_state(self) -> Snapshot:
        """The donor's state as of `Start`."""
        self._stream.say(STATE)
        frame = self.pop()
        if not isinstance(frame, Snapshot):
            raise RelayError("the donor violates the protocol")
        return frame

    def close(self) -> None:
        """End the connection."""
        self._stream.close()

    def join(self, until: float) -> None:
        """Wait for the end of the thread until the time ``until``."""
        self._thread.join(max(until - time.monotonic(), 0))

    def record(self, call: Call) -> Record:
        """The next unit of ``call``."""
        while True:
            frame = self.peek()
            if not isinstance(frame, Record):
                raise RelayError(f"the donor has sent nothing for {call}")
            self.pop()
            if frame.call[:2] == call[:2]:
                return frame
