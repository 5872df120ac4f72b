"""The streams of calls: what the caller passed, or what an array names."""

from typing import Any

from numba_symm import arrays, streams


class CallStreams:
    """Chooses the streams of a communicator's calls, and returns their handles.

    Args:
        given: the stream of calls whose array names none; None: the legacy default
            stream.

    Attributes:
        given: the same.
    """

    def __init__(self, given: Any):
        self.given = given
        self._own = streams.handle_or_default(given)

    def of(self, stream: Any, array: Any) -> int:
        """Return the stream that was passed; for None, that of work on an array."""
        if stream is not None:
            return streams.handle_or_default(stream)
        named = arrays.stream_of(array)
        return self._own if named is None else named

    def handle(self, stream: Any, kind: Any, array: Any) -> int:
        """Do as :meth:`of`, for an array of a known one of ``arrays.KINDS``."""
        if stream is not None:
            return streams.handle_or_default(stream)
        named = None if kind.stream is None else kind.stream(array)
        return self._own if named is None else named

    def default(self, stream: Any) -> int:
        """Return the stream that was passed; for None, the communicator's."""
        return self._own if stream is None else streams.handle_or_default(stream)
