"""The expected output of an operation, from its entry in the table of operations."""


def expected(operation, inputs, rank, root, reduced, of_none, joined):
    """Return a rank's expected output; None if it has none.

    Args:
        operation: the entry.
        inputs: all ranks' inputs, sequences of one axis.
        rank: the rank.
        root: the root, of an operation that has one.
        reduced: returns the reduction of sequences, at least one, by rank.
        of_none: returns the output of a number of elements with nothing to reduce.
        joined: returns the sequences of a list, one after another.
    """
    if operation.at_root and rank != root:
        return None
    exchange, size = operation.exchange, len(inputs)
    if exchange.sends_shards:
        count = len(inputs[0]) // size
        inputs = [each[rank * count :][:count] for each in inputs]
    used = {r: inputs[r] for r in exchange.output.used(rank, size, root)}
    if not operation.reduces:
        return joined(list(used.values()))
    return reduced(used) if used else of_none(len(inputs[0]))
