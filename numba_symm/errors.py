"""The errors that the library raises.

A text has the form ``call: expected A, got B; do C``. If a set-up call fails on one
rank, every rank raises an error with the texts of all ranks (see
:meth:`numba_symm.launch.store.StoreExchange.agreed`).
"""


class SymmError(Exception):
    """The base class of all errors of numba_symm."""


class ArgumentError(SymmError, ValueError):
    """An argument is wrong: its type, dtype, shape, rank or combination."""


class GapsError(ArgumentError):
    """An array has gaps; a caller may pass contiguous memory in its place."""


class ClosedError(SymmError):
    """The communicator or memory was closed, or abandoned after a failure."""


class ExchangeError(SymmError):
    """The ranks could not exchange bytes or file descriptors."""


class DeviceError(SymmError):
    """The ranks cannot be bound to GPUs as requested."""


class PeerAccessError(DeviceError):
    """Two GPUs cannot access each other's memory."""


class BackendError(SymmError):
    """Memory could not be allocated, exported, imported or mapped."""


class ArraysDiffer(SymmError):
    """The ranks passed arrays with different bits to ``check_equal``.

    Attributes:
        ranks: the ranks whose arrays differ from those of most ranks.
        index: the first index at which any two arrays differ.
    """

    def __init__(
        self,
        text: str = "",
        *,
        ranks: tuple[int, ...] = (),
        index: tuple[int, ...] = (),
    ):
        super().__init__(text)
        self.ranks = ranks
        self.index = index


class DriverError(BackendError):
    """A CUDA driver call failed; the text states the call and the driver's reason."""


class CollectiveError(SymmError):
    """The communicator has failed on all ranks; the text states the cause.

    The CUDA context stays usable. Results since the last successful check are
    undefined.

    Attributes:
        ranks: the ranks that the text names. After a timeout: the rank that waited, and
            those for which it waited. After a mismatch: the two ranks whose calls
            differ. If a rank left: that rank.
        operation: the operation that the text names, such as ``"all_reduce
            (one_shot_ll)"`` or ``"zeros"``; ``""`` if it is unknown.
        hint: another possible cause; ``""`` if there is none.
    """

    def __init__(
        self,
        text: str = "",
        *,
        ranks: tuple[int, ...] = (),
        operation: str = "",
        hint: str = "",
    ):
        super().__init__(text)
        self.ranks = ranks
        self.operation = operation
        self.hint = hint


class CollectiveTimeout(CollectiveError, TimeoutError):
    """A peer did not make its call before the deadline.

    The text names the rank that waited, the peer and the operation.
    """


class CallMismatch(CollectiveError):
    """The calls of two ranks differ; the text names the ranks and possible causes."""


class Aborted(CollectiveError):
    """``Communicator.abort``, or ``numba-symm status --abort``, ended the communicator.

    The text names the rank that called ``abort``, or the command's process, and the
    reason.
    """


class RankLeft(CollectiveError):
    """A rank left with an exception, was interrupted, or ended without ``close``.

    The text names the rank, and the exception's type and first line.
    """


def summary(error: BaseException) -> str:
    """Return an exception's type and the first line of its text."""
    try:
        first = str(error).partition("\n")[0]
    except Exception:  # an exception whose __str__ raises is still reported
        first = ""
    kind = type(error).__name__
    return f"{kind}: {first}" if first else kind


def left(cause: BaseException, operation: str = "") -> str:
    """Return "left zeros with ValueError: 7", for the errors of the other ranks."""
    # After an interrupt on the way into a ``with`` block, its generator is dropped.
    interrupted = isinstance(cause, GeneratorExit)
    reason = "an interrupt" if interrupted else summary(cause)
    return f"left{operation and ' '}{operation} with {reason}"


def named(name: str) -> type[SymmError]:
    """Return the error class with that name, or ``SymmError`` if there is none."""
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, SymmError):
        return found
    return SymmError
