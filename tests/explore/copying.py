"""Copies in the explorer: each is a kernel that copies word by word."""

import functools

from explore.launches import Launch


class Copies:
    """A rank's copies.

    Args:
        code: the device code.
        size: the number of ranks.
        workspace: the rank's, which shows whether the ranks refused a call; 0: they
            refuse none.
    """

    def __init__(self, code, size, workspace=0):
        self.refused = code.handshake.make_refused(size)
        place_of = code.handshake.make_place(size)
        self.kernel = code.programs.copy
        self.place = place_of(workspace, 0) if workspace else 0
        self.mine = []  # the rank's arrays, first and last byte

    def on(self, stream):
        """Return a stream that has them."""

        def copy(target, source, nbytes):
            here = any(first <= source <= last for first, last in self.mine)
            place = 0 if here else self.place
            args = (self.refused, place, target, source, nbytes // 8)
            stream.append(Launch(self.kernel, 1, args, is_copy=True))

        stream.copy = copy
        return stream


class Order:
    """A substitute for a rank's ``StreamOrder``."""

    def __init__(self, machine, rank, copies):
        self._machine, self._rank, self._copies = machine, rank, copies

    @functools.cached_property
    def side(self):
        """The rank's second stream, made when a call needs it."""
        return self._copies.on(self._machine.stream_of(self._rank))
