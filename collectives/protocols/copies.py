"""Code that the algorithms with copy engines share.

Copy engines use more of the links' bandwidth than kernels do, and leave the
multiprocessors free. Nothing can stop a copy that has been enqueued, so no copy may
write another rank's array: each rank copies from the other ranks' arrays into its own.
So after a failure, a late rank changes only its own output, and its next call raises.

An exchange with copy engines is a call between the ranks' own arrays (``handshake.py``)
whose second launch is a series of copies. The host enqueues them, so it must know
beforehand where the other ranks' arrays are. It assumes that they are at the same place
of the same allocation as its own. If the handshake finds an array elsewhere, all ranks
refuse the call. The copies run nevertheless, into the rank's own output, which the
third launch then overwrites with the result.

Memory order. In an exchange, a rank's copies begin after its handshake, and thus after
all work that any rank's stream did before that rank's handshake. The third launch, in
which all ranks wait for each other, begins after the copies. So no array changes while
another rank copies from it. Copies follow one another on the call's stream, from the
next rank on, because several simultaneous ones share the links badly.
"""

from typing import Any

from numba_symm.collectives.protocols.binding import (
    Call,
    Endpoint,
    Enqueue,
    Series,
)
from numba_symm.gpu.streams import Copy


class Beside:
    """Copies, and others beside them on the side stream.

    Args:
        order: the communicator's ``StreamOrder``.
        copies: enqueues those of the call's stream.
        beside: enqueues those of the side stream.
    """

    def __init__(self, order: Any, copies: Enqueue, beside: Enqueue):
        self._order = order
        self._copies = copies
        self._beside = beside

    def __call__(self, stream: int) -> None:
        """Enqueue them; what follows on ``stream`` follows all of them."""
        side = self._order.side
        with side.joined(stream):
            side.follow(stream, 0)
            self._beside(side.stream)
            side.mark(0)
            self._copies(stream)
            side.lead(stream, 0)


def bind_alone(end: Endpoint, call: Call) -> Enqueue:
    """Return the call of a rank without others, whose result is its input."""
    if call.target == call.source:
        return Series()
    return Copy(call.target, call.source, call.nbytes)
