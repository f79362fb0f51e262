"""A time limit for a block of code: an exception ends it when the time is over."""

import math
import signal
import time


class DeadlineExpired(BaseException):
    """The time is over. Derives from BaseException so that no `except Exception` in between catches it."""


class Deadline:
    """Raises DeadlineExpired in the main thread if the body of its `with` runs longer than `limit_s` seconds.

    Raises once, and never after the `with`. Without a limit (None) it uses no signal.
    """

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._is_armed = False
        self.restart()

    def restart(self) -> None:
        """Start the time limit again from now. Any thread may call this."""
        self._due_s = time.monotonic() + (math.inf if self.limit_s is None else self.limit_s)

    @property
    def is_expired(self) -> bool:
        return time.monotonic() >= self._due_s

    def __enter__(self) -> None:
        if self.limit_s is not None:
            self._handler_before = signal.signal(signal.SIGALRM, self._ring)
            self._is_armed = True
            signal.setitimer(signal.ITIMER_REAL, self.limit_s)

    def __exit__(self, *_: object) -> None:
        self._is_armed = False  # first: an alarm that arrives from here on does nothing
        if self.limit_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._handler_before)

    def _ring(self, *_: object) -> None:
        left_s = self._due_s - time.monotonic()
        if self._is_armed and left_s > 0:  # restarted since it was set
            signal.setitimer(signal.ITIMER_REAL, left_s)
        elif self._is_armed:
            self._is_armed = False
            raise DeadlineExpired
