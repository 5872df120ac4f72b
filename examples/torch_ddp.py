"""Train a model with torch's DistributedDataParallel over this library.

    torchrun --nproc-per-node 2 examples/torch_ddp.py

Each rank learns from its own images of handwritten digits, and torch sums the gradients
by the backend "symm". ``--backend nccl`` trains by NCCL, for comparison.
"""

import argparse
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

import numba_symm.torch  # noqa: F401  # registers the backend

ACCURACY = 0.95  # the least that passes


def load(rank, size, device):
    """Return this rank's images and labels, then those of the test."""
    digits = load_digits()
    order = np.random.default_rng(seed=0).permutation(len(digits.data))
    images = torch.tensor(digits.data[order] / 16, dtype=torch.float32, device=device)
    labels = torch.tensor(digits.target[order], device=device)
    mine = slice(400 + rank, None, size)
    return images[mine], labels[mine], images[:400], labels[:400]


def train(steps, width, device):
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = load(rank, size, device)
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    model = torch.nn.Sequential(*layers).to(device)
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    began = None
    for step in range(steps):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == steps // 2:  # the first steps load kernels
            loss.item()
            began = time.perf_counter()
    loss = loss.item()
    each = (time.perf_counter() - began) / (steps - 1 - steps // 2)
    with torch.no_grad():
        right = model.module(test_images).argmax(1) == test_labels
    accuracy = right.float().mean().item()
    if rank == 0:
        print(f"loss {loss:.6f}, accuracy {accuracy:.3f}, {1e3 * each:.2f} ms a step")
    if accuracy < ACCURACY:
        raise SystemExit(f"expected an accuracy of at least {ACCURACY}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="symm")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    asked = parser.parse_args()
    device = "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = "cuda"
    dist.init_process_group(asked.backend)
    train(asked.steps, asked.width, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
