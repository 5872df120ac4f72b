"""Every error the library raises.

Texts say what was asked, what was found and what to do. An error met by one
rank during a collective set-up step is raised on every rank, with every rank's
own text (see :meth:`numba_symm.launch.exchange.StoreExchange.agreed`).
"""


class SymmError(Exception):
    """The root of all errors raised by numba_symm."""


class ArgumentError(SymmError, ValueError):
    """An argument is wrong: its type, dtype, shape, rank or combination."""


class ClosedError(SymmError):
    """The communicator or memory was closed, or was given up after a failure."""


class ExchangeError(SymmError):
    """The ranks could not exchange bytes or file descriptors."""


class DeviceError(SymmError):
    """The ranks cannot be bound to GPUs as asked."""


class PeerAccessError(DeviceError):
    """Two GPUs cannot reach each other's memory."""


class BackendError(SymmError):
    """Memory could not be allocated, exported, imported or mapped."""


class DriverError(BackendError):
    """A CUDA driver call failed; the text names the call and the driver's reason."""


class CollectiveError(SymmError):
    """The communicator has failed, on all ranks: the subclass and the text say why.

    The CUDA context is alive; results since the last successful check are undefined.
    """


class CollectiveTimeout(CollectiveError, TimeoutError):
    """A peer did not come before the deadline.

    The text names who waited for whom, in which operation.
    """


class CallMismatch(CollectiveError):
    """Two ranks' calls differ: the text names them, and what may differ."""


class RankLeft(CollectiveError):
    """A rank has left by an exception, or was interrupted: the text names it."""


def named(name: str) -> type[SymmError]:
    """Return the error class called ``name``, or ``SymmError`` for a foreign one."""
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, SymmError):
        return found
    return SymmError
