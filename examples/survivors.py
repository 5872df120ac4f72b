"""Train a classifier on several GPUs; one rank dies, and the others continue.

    numba-symm run --survive -n 4 examples/survivors.py

Each rank computes the gradient of its share of the samples, and an ``all_reduce`` sums
the gradients. In the middle of the training, rank 1 is killed. The other ranks raise an
error, rebuild the communicator without that rank, divide all samples again, and repeat
the step. So the result is the same as without a failure.
"""

import os
import signal
import sys

import numpy as np
from mpi4py import MPI
from numba import cuda

import numba_symm as ns

SAMPLES, TESTS = 1200, 400
FEATURES, CLASSES = 20, 10
NOISE = 1.0  # of each feature, as the deviation of the centers of the classes
STEPS = 30
RATE, MOMENTUM = 0.5, 0.9
DIES, AT = 1, 12  # which rank is killed, and in which step
TIMEOUT = 3.0  # seconds after which calls without that rank raise
TOLERANCE = 1e-4  # fewer ranks add in another order
ACCURACY = 0.9  # the least that passes


def samples():
    """Return the features, with a 1 for the bias, and the classes of all samples."""
    lot = np.random.default_rng(seed=0)
    centers = lot.standard_normal((CLASSES, FEATURES))
    classes = lot.integers(0, CLASSES, SAMPLES + TESTS)
    noise = NOISE * lot.standard_normal((len(classes), FEATURES))
    ones = np.ones((len(classes), 1))
    return np.hstack([centers[classes] + noise, ones]).astype(np.float32), classes


def gradient(weights, features, classes):
    """Return these samples' term in the gradient of the mean loss of all samples."""
    scores = features @ weights
    errors = np.exp(scores - scores.max(axis=1, keepdims=True))
    errors /= errors.sum(axis=1, keepdims=True)
    errors[np.arange(len(classes)), classes] -= 1
    return features.T @ errors / np.float32(SAMPLES)


class Model:
    """The weights, their velocity, and the number of steps they have had."""

    def __init__(self):
        self.values = np.zeros((2, FEATURES + 1, CLASSES), np.float32)
        self.steps = 0

    @property
    def weights(self):
        """The weights."""
        return self.values[0]

    def update(self, total):
        """Do one step of gradient descent with momentum."""
        velocity = MOMENTUM * self.values[1] - RATE * total
        self.values = np.stack([self.values[0] + velocity, velocity])
        self.steps += 1


def catch_up(comm, model):
    """Give all ranks the model of the rank that has had the most steps.

    A failure may reach a rank before it has ended a step, and another one after that.
    """
    numbers = comm.all_gather(cuda.to_device(np.array([model.steps])))
    comm.synchronize()
    steps = numbers.copy_to_host().ravel()
    latest = int(steps.argmax())
    values = cuda.to_device(model.values)
    comm.broadcast(values, root=latest)
    comm.synchronize()
    model.values, model.steps = values.copy_to_host(), int(steps[latest])


def finish(comm, model, features, classes):
    """Do the steps that are left, by all ranks of ``comm``."""
    first_size = MPI.COMM_WORLD.size
    catch_up(comm, model)
    features = np.array_split(features, comm.size)[comm.rank]
    classes = np.array_split(classes, comm.size)[comm.rank]
    summed = comm.zeros(model.weights.shape, np.float32)
    while model.steps < STEPS:
        if (model.steps, comm.rank, comm.size) == (AT, DIES, first_size):
            os.kill(os.getpid(), signal.SIGKILL)
        with comm.tag(f"step {model.steps}"):
            summed.copy_to_device(gradient(model.weights, features, classes))
            comm.all_reduce(summed, out=summed)
            comm.synchronize()  # raises if a rank did not make the call
        model.update(summed.copy_to_host())


def main():
    """Train, compare with one process without a failure, and end this process."""
    features, classes = samples()
    given = features[:SAMPLES], classes[:SAMPLES]
    model, failures = Model(), []
    comm = ns.Communicator(MPI.COMM_WORLD, timeout=TIMEOUT)
    while model.steps < STEPS:
        try:
            finish(comm, model, *given)
        except ns.CollectiveError as error:
            failures.append(f"{type(error).__name__} after {model.steps} steps")
            comm = comm.rebuild()
    comm.check_equal(cuda.to_device(model.weights))

    alone = Model()
    while alone.steps < STEPS:
        alone.update(gradient(alone.weights, *given))
    difference = float(np.abs(model.weights - alone.weights).max())
    found = (features[SAMPLES:] @ model.weights).argmax(axis=1)
    accuracy = float(np.mean(found == classes[SAMPLES:]))
    lost = MPI.COMM_WORLD.size - comm.size
    good = accuracy > ACCURACY and difference < TOLERANCE and lost == 1
    if comm.rank == 0:
        print("failures:", ", ".join(failures) or "none")
        print(f"ranks: {MPI.COMM_WORLD.size} at first, {comm.size} in the end")
        print(f"accuracy: {accuracy:.1%} of {TESTS} samples")
        print(f"largest difference from one process: {difference:.1e}")
        print("all good" if good else "something is wrong")
    comm.close()
    sys.stdout.flush()
    os._exit(0 if good else 1)  # MPI's own end would wait for the rank that died


if __name__ == "__main__":
    main()
