"""Compute a layer of a mixture of experts and its gradients, on all ranks together.

    numba-symm run -n 4 examples/mixture.py

Each rank has some tokens and some experts, which are matrices here. A token's result is
the sum of its experts' outputs, each times a weight. ``dispatch`` sends tokens to the
ranks of their experts, and ``combine`` returns the sums. The backward pass sends the
gradients of the results to the tokens' places, which follow from the expert numbers
alone.

All numbers are small integers, so sums are exact. The results and all gradients must be
equal to those of one process that has all tokens and all experts.
"""

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns
from numba_symm.environment import SIMULATED

EACH, TOP_K = 2, 2  # experts of a rank, and of a token
TOKENS, HIDDEN = (5, 8) if SIMULATED else (500, 64)
GRID, THREADS = (2, 4) if SIMULATED else (32, 128)


@cuda.jit
def apply(rows, ids, weights, counts, matrices, results):
    """Store the weighted sum of each received row's products with its matrices."""
    for source in range(counts.size):
        for row in range(cuda.blockIdx.x, counts[source], cuda.gridDim.x):
            for j in range(cuda.threadIdx.x, HIDDEN, cuda.blockDim.x):
                total = np.float32(0)
                for k in range(TOP_K):
                    expert = ids[source, row, k]
                    if expert >= 0:
                        made = np.float32(0)
                        for i in range(HIDDEN):
                            made += rows[source, row, i] * matrices[expert, i, j]
                        total += made * weights[source, row, k]
                results[source, row, j] = total


@cuda.jit
def of_weights(tokens, grads, ids, counts, experts, results):
    """Store the gradients of each token's weights in its first columns."""
    for source in range(counts.size):
        for row in range(cuda.blockIdx.x, counts[source], cuda.gridDim.x):
            for k in range(cuda.threadIdx.x, HIDDEN, cuda.blockDim.x):
                total = np.float32(0)
                if k < TOP_K and ids[source, row, k] >= 0:
                    for i in range(HIDDEN):
                        for j in range(HIDDEN):
                            made = experts[ids[source, row, k], i, j]
                            made *= tokens[source, row, i] * grads[source, row, j]
                            total += made
                results[source, row, k] = total


@cuda.jit
def of_experts(tokens, grads, ids, weights, counts, result):
    """Store the gradients of this rank's experts."""
    for expert in range(EACH):
        for i in range(cuda.blockIdx.x, HIDDEN, cuda.gridDim.x):
            for j in range(cuda.threadIdx.x, HIDDEN, cuda.blockDim.x):
                total = np.float32(0)
                for source in range(counts.size):
                    for row in range(counts[source]):
                        for k in range(TOP_K):
                            if ids[source, row, k] == expert:
                                made = tokens[source, row, i] * grads[source, row, j]
                                total += made * weights[source, row, k]
                result[expert, i, j] = total


def on_ranks(comm, x, ids, weights, experts, grads):
    """Return this rank's results and gradients."""
    moe = comm.experts(EACH * comm.size, top_k=TOP_K, hidden=HIDDEN, tokens=TOKENS)
    given = cuda.to_device(ids), cuda.to_device(weights)
    found = moe.dispatch(cuda.to_device(x), *given)
    tokens, numbers, factors, _, counts = found
    kept = cuda.device_array_like(tokens)  # the next dispatch replaces the tokens
    kept.copy_to_device(tokens)
    matrices = cuda.to_device(experts)
    transposed = cuda.to_device(np.ascontiguousarray(experts.transpose(0, 2, 1)))
    launch = GRID, THREADS
    apply[launch](tokens, numbers, factors, counts, matrices, moe.results)
    y = moe.combine()

    moe.dispatch(cuda.to_device(grads), *given)
    # The gradients of the tokens are products with the transposed matrices.
    apply[launch](tokens, numbers, factors, counts, transposed, moe.results)
    dx = moe.combine()
    of_weights[launch](kept, tokens, numbers, counts, matrices, moe.results)
    dweights = moe.combine()
    dexperts = cuda.device_array_like(matrices)
    of_experts[launch](kept, tokens, numbers, factors, counts, dexperts)
    comm.synchronize()
    dweights = dweights.copy_to_host()[:, :TOP_K]
    return y.copy_to_host(), dx.copy_to_host(), dweights, dexperts.copy_to_host()


def on_one(x, ids, weights, experts, grads):
    """Return the results and gradients of all tokens and experts."""
    y, dx = np.zeros_like(x), np.zeros_like(x)
    dweights, dexperts = np.zeros_like(weights), np.zeros_like(experts)
    for t, k in np.ndindex(ids.shape):
        matrix, weight = experts[ids[t, k]], weights[t, k]
        y[t] += weight * (x[t] @ matrix)
        dx[t] += weight * (matrix @ grads[t])
        dweights[t, k] = x[t] @ matrix @ grads[t]
        dexperts[ids[t, k]] += weight * np.outer(x[t], grads[t])
    return y, dx, dweights, dexperts


def main():
    """Compute the layer on all ranks and on one, and compare."""
    with ns.Communicator(MPI.COMM_WORLD) as comm:
        draw = np.random.default_rng(1)  # the same on all ranks

        def numbers(*shape):
            return draw.integers(-2, 3, shape).astype(np.float32)

        total = TOKENS * comm.size
        x, grads = numbers(total, HIDDEN), numbers(total, HIDDEN)
        experts = numbers(EACH * comm.size, HIDDEN, HIDDEN)
        weights = draw.integers(1, 4, (total, TOP_K)).astype(np.float32)
        ids = draw.integers(0, len(experts), (total, TOP_K)).astype(np.int32)
        mine = slice(TOKENS * comm.rank, TOKENS * (comm.rank + 1))
        own = slice(EACH * comm.rank, EACH * (comm.rank + 1))
        given = x[mine], ids[mine], weights[mine], experts[own], grads[mine]
        found = on_ranks(comm, *given)
        wanted = on_one(x, ids, weights, experts, grads)
        for each, all_of_it, part in zip(
            found, wanted, (mine, mine, mine, own), strict=True
        ):
            np.testing.assert_array_equal(each, all_of_it[part])
        print(f"rank {comm.rank} has the results and gradients of one process")


if __name__ == "__main__":
    main()
