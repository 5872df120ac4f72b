"""Train a classifier of handwritten digits on several GPUs.

    numba-symm run -n 4 examples/digits.py

This is data-parallel training of softmax regression with momentum. Each rank computes
the gradient of its share of the training images. In each step, one ``all_reduce`` sums
the gradients, in place, in symmetric memory. Every rank then updates its weights
with the same sum.
"""

import sys

import numpy as np
from mpi4py import MPI
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

import numba_symm as ns
from numba_symm.environment import SIMULATED

STEPS = 100
RATE = 0.5
MOMENTUM = 0.9
TEST_IMAGES = 360  # of 1797
ACCURACY = 0.9  # the least that passes
TOLERANCE = 1e-4  # the order of additions differs; 1.2e-6 was measured on 4 ranks


def load():
    """Return training images and labels, then those of the test.

    Each row is an image, with a 1 for the bias.
    """
    digits = load_digits()
    ones = np.ones((len(digits.data), 1))
    images = np.hstack([digits.data / 16, ones]).astype(np.float32)
    order = np.random.default_rng(seed=0).permutation(len(images))
    test, train = np.split(order, [TEST_IMAGES])
    return images[train], digits.target[train], images[test], digits.target[test]


def gradient(weights, images, labels, total):
    """Return these images' term in the gradient of the mean loss over ``total``."""
    scores = images @ weights
    errors = np.exp(scores - scores.max(axis=1, keepdims=True))
    errors /= errors.sum(axis=1, keepdims=True)
    errors[np.arange(len(labels)), labels] -= 1
    return images.T @ errors / np.float32(total)


def train(gradient_at, steps):
    """Return the weights, float32 of shape (65, 10), after gradient descent."""
    weights = np.zeros((65, 10), np.float32)
    velocity = np.zeros_like(weights)
    for _ in steps:
        velocity = MOMENTUM * velocity - RATE * gradient_at(weights)
        weights = weights + velocity
    return weights


def train_together(comm, images, labels):
    """Return the weights that all ranks of ``comm`` learn from their shares."""
    total = len(images)
    images = np.array_split(images, comm.size)[comm.rank]
    labels = np.array_split(labels, comm.size)[comm.rank]
    summed = comm.zeros(65 * 10, np.float32)

    def gradient_at(weights):
        part = gradient(weights, images, labels, total)
        summed.copy_to_device(part.ravel())
        comm.all_reduce(summed, out=summed)
        comm.synchronize()  # raises if a rank did not make the call
        return summed.copy_to_host().reshape(part.shape)

    steps = track(range(STEPS), "Training", disable=comm.rank != 0)
    return train(gradient_at, steps)


def show(facts, good):
    """Print the facts as a table, and the verdict."""
    table = Table(title="Handwritten digits", show_header=False)
    for row in facts.items():
        table.add_row(*row)
    console = Console()
    console.print(table)
    if SIMULATED:
        console.print("This ran in Numba's CUDA simulator, without a GPU.")
    console.print("[green]All good.[/]" if good else "[red]Something is wrong.[/]")


def main():
    """Train, compare with one process, and return the exit code."""
    world = MPI.COMM_WORLD
    images, labels, test_images, test_labels = load()
    with ns.Communicator(world) as comm:
        weights = train_together(comm, images, labels)
        devices = world.allgather(comm.device.name)
        backend = comm.backend

    alone = train(lambda w: gradient(w, images, labels, len(images)), range(STEPS))
    difference = float(np.abs(weights - alone).max())
    accuracy = float(np.mean((test_images @ weights).argmax(axis=1) == test_labels))
    identical = len(set(world.allgather(weights.tobytes()))) == 1
    good = accuracy > ACCURACY and difference < TOLERANCE and identical

    if world.rank == 0:
        show(
            {
                "ranks": str(world.size),
                "backend": backend,
                "devices": ", ".join(sorted(set(devices))),
                "steps": str(STEPS),
                "test accuracy": f"{accuracy:.1%} of {TEST_IMAGES} images",
                "weights identical on all ranks": "yes" if identical else "NO",
                "largest difference from one process": f"{difference:.1e}",
                "largest difference allowed": f"{TOLERANCE:.0e}",
            },
            good,
        )
    return 0 if world.allreduce(good, MPI.LAND) else 1


if __name__ == "__main__":
    sys.exit(main())
