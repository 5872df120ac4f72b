"""One thread at a time: the guard of a communicator's calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident, local

from numba_symm.errors import ArgumentError
from numba_symm.launch import devices


class ThreadGuard:
    """Refuses the calls of other threads while one is in a call of a communicator.

    Args:
        ordinal: the ordinal of the communicator's GPU.

    Attributes:
        held: whether a group is open, so that the thread is in a call between calls.
    """

    def __init__(self, ordinal: int):
        self.held = False
        self._ordinal = ordinal
        self._within: dict[None, int] = {}  # the identifier of the thread in a call
        self._threads = local()  # has ``ready`` in threads where the GPU is current

    def begin(self, what: str) -> None:
        """Begin a call. Calls of other threads are refused until :meth:`finish`.

        Args:
            what: the call that begins.

        Raises:
            ArgumentError: another thread is in a call, or another GPU is current.
        """
        if not hasattr(self._threads, "ready"):
            devices.enter_thread(self._ordinal, what)
            self._threads.ready = True
        # Atomic. If an interrupt prevented this thread's finish, it may begin again.
        thread = get_ident()
        if self._within.setdefault(None, thread) != thread:
            raise ArgumentError(
                f"{what}: expected one thread at a time in a communicator's calls, "
                "got a second one; give each thread its own, made with dup()"
            )

    def finish(self) -> None:
        """End a call; in an open group, other threads are still refused."""
        if not self.held:
            self._within.clear()

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Make a call between :meth:`begin` and :meth:`finish`."""
        self.begin(what)
        try:
            yield
        finally:
            self.finish()
