"""A deadline: how long a point may take, after which an exception ends what runs it."""

import math
import signal
import time


class DeadlineExpired(BaseException):
    """The time is over. No Exception, so that nothing on the way takes it for an error of its own and goes on."""


class Deadline:
    """What runs inside its `with`, in the main thread, has so many seconds; then Expired is raised there.

    Once, and never after the `with`. Without a limit (None) nothing is raised and no signal is used.
    """

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._is_armed = False
        self.restart()

    def restart(self) -> None:
        """Give the whole time again, from now on; any thread may."""
        self._due_s = time.monotonic() + (math.inf if self.limit_s is None else self.limit_s)

    @property
    def is_expired(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._due_s

    def __enter__(self) -> None:
        if self.limit_s is not None:
            self._handler_before = signal.signal(signal.SIGALRM, self._ring)
            self._is_armed = True
            signal.setitimer(signal.ITIMER_REAL, self.limit_s)

    def __exit__(self, *_: object) -> None:
        self._is_armed = False  # first: an alarm that is under way rings in vain
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
