"""The streams of calls: what the caller passed, or what an array names."""

from typing import Any

from numba_symm import arrays, streams

HeldStream = tuple[int, Any]
"""A stream's handle, and the object that keeps the stream."""


def owned(stream: Any) -> HeldStream:
    """Return a stream's handle, and the object that keeps the stream or None."""
    owner = None if isinstance(stream, int) else stream
    return streams.handle_or_default(stream), owner


class CallStreams:
    """Chooses the streams of a communicator's calls.

    Args:
        given: the stream of calls whose array names none; None: the legacy default
            stream.

    Attributes:
        given: the same.
    """

    def __init__(self, given: Any):
        self.given = given
        self._own = owned(given)

    def handle(self, stream: Any, kind: Any, array: Any) -> int:
        """Return the handle of the stream that :meth:`of` returns.

        Args:
            stream: the stream that was passed, or None.
            kind: of ``arrays.KINDS``, how the array is read.
            array: the array.
        """
        if stream is not None:
            return streams.handle_or_default(stream)
        named = None if kind.stream is None else kind.stream(array)
        return self._own[0] if named is None else named

    def of(self, stream: Any, array: Any) -> HeldStream:
        """Return the stream that was passed; for None, that of work on an array."""
        if stream is None:
            named = arrays.stream_of(array)
            return self._own if named is None else (named, None)
        return owned(stream)

    def default(self, stream: Any) -> HeldStream:
        """Return the stream that was passed; for None, the communicator's."""
        return self._own if stream is None else owned(stream)
