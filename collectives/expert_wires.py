"""Tokens that cross the links as codes of one byte: ``dispatch(wire=…)``.

The sender encodes its tokens as ``wires.py`` does, in groups of 128 elements. A
dispatch sends these codes and scales instead of the tokens, in either form. The
receiver decodes them into the dtype of the tokens. The order of memory accesses:

1. The sender's first kernel stores codes in memory that only the sender uses.
2. The dispatch loads them, and stores them in the receivers' memory for results. No
   rank loads results there meanwhile: every earlier combine has ended on all ranks that
   load (``expert_combine.py``), or other ranks do not load its results.
3. The receiver's last kernel loads them, and stores tokens in its own memory. This
   kernel follows the dispatch on the rank's stream, so all codes have been stored.
"""

from typing import Any

from numba_symm.arguments import shown
from numba_symm.collectives import wires
from numba_symm.collectives.kernels import coded_sum
from numba_symm.collectives.protocols.binding import Endpoint, Enqueue
from numba_symm.collectives.protocols.workspace import VECTOR
from numba_symm.device.groups import GROUP
from numba_symm.dtypes import Element
from numba_symm.environment import SIMULATED
from numba_symm.errors import ArgumentError
from numba_symm.launch.devices import GPU

_WHOLE = coded_sum.IN_RECORD * GROUP


def vectors_of(hidden: int) -> int:
    """Return the vectors of a token's codes and scales; 0: it cannot have codes."""
    return 0 if hidden % _WHOLE else hidden // _WHOLE * coded_sum.RECORD // VECTOR


def check(wire: Any, hidden: int, gpu: GPU, what: str) -> None:
    """Refuse codes that tokens of so many elements cannot have, or that have no name.

    Args:
        wire: the argument of that name, not None.
        hidden: the elements of a token.
        gpu: the rank's GPU.
        what: the call, for the error.
    """
    wires.check_name(wire, what)
    if not vectors_of(hidden):
        raise ArgumentError(
            f"{what}: expected tokens of a multiple of {_WHOLE} elements with "
            f"wire={shown(wire)}, got hidden {hidden}; dispatch without wire="
        )
    if not SIMULATED:
        wires.check_capability(wire, gpu, what)


def bind_encode(
    end: Endpoint, wire: str, kind: Element, x: int, codes: int, elements: int
) -> Enqueue:
    """Return the launch that encodes tokens.

    Args:
        end: this rank's end.
        wire: the name of the codes.
        kind: the type of the tokens.
        x: the address of the tokens.
        codes: where their codes are stored.
        elements: those of all tokens, at least one.
    """
    kernel = coded_sum.encode_kernel(end.size, wires.WIRES[wire], kind, False)
    number = elements // GROUP
    return coded_sum.bind(kernel, end, number, x, codes, elements, number)


def bind_decode(
    end: Endpoint,
    wire: str,
    kind: Element,
    codes: int,
    target: int,
    counts: int,
    capacity: int,
    hidden: int,
) -> Enqueue:
    """Return the launch that decodes what a rank has received.

    Args:
        end: this rank's end.
        wire: the name of the codes.
        kind: the type of the tokens.
        codes: the address of the codes, with room for ``capacity`` tokens of each rank.
        target: the same, of the tokens.
        counts: the address of how many tokens each rank has sent.
        capacity: for how many tokens of each rank there is room.
        hidden: the elements of a token.
    """
    kernel = coded_sum.decode_rows_kernel(end.size, wires.WIRES[wire], kind)
    width = hidden // GROUP
    arguments = codes, target, counts, capacity, width
    return coded_sum.bind(kernel, end, end.size * capacity * width, *arguments)
