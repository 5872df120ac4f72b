"""What tests need to know about an algorithm, from its entry in the table."""

from numba_symm import dtypes
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.protocols.workspace import CHUNKED, ONE_SHOT, TWO_SHOT

ONE_SHOTS = {f"one_shot_{name}": protocol for name, protocol in ONE_SHOT.items()}
TWO_SHOTS = {f"two_shot_{name}": protocol for name, protocol in TWO_SHOT.items()}
PROTOCOLS = ONE_SHOTS | TWO_SHOTS | {"chunked": CHUNKED}
"""By region of the workspace."""


def entry(name, algorithm):
    """Return the entry of an operation's algorithm."""
    return OPERATIONS[name].algorithms[algorithm]


def those(name, holds):
    """Return the names of an operation's algorithms for whose entries it holds."""
    return [each for each, made in OPERATIONS[name].algorithms.items() if holds(made)]


def transports(algorithm):
    """Return the transports of an algorithm; all operations have it by one name."""
    made = [each.algorithms.get(algorithm) for each in OPERATIONS.values()]
    return {each.transport for each in made if each and each.transport}


def takes(name, algorithm, dtype):
    """Return whether an operation's algorithm, or None, is for a dtype."""
    if algorithm is None or not OPERATIONS[name].reduces:
        return True
    return not entry(name, algorithm).floats or dtypes.element(dtype, "test").floating


def usable(name, algorithm, dtype):
    """Return the algorithm, or the one after it that is for a dtype."""
    following = those(name, lambda made: True)
    following = following[following.index(algorithm) :]
    return next(each for each in following if takes(name, each, dtype))
