"""The matrix product that runs beside a collective: torch's, or a kernel of our own.

CuPy's products are not used: CuPy refuses calls of cuBLAS in a capture (cupy#6290).
The elements are -1, 0 and 1, so the result is exact in any order of additions.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numba import cuda

from numba_symm.bench.options import torch_multiplies
from numba_symm.environment import SIMULATED

SIDE = 4096
"""Rows and columns of torch's matrices: a product takes about 0.2 ms on an H200."""

ROWS, INNER = (4, 4) if SIMULATED else (1024, 256)
"""Rows of the left matrix, and its columns, for our kernel."""

BLOCK = 2 if SIMULATED else 16
"""Threads of our kernel's blocks, in each direction."""


class Product(Protocol):
    """A matrix product.

    Attributes:
        name: for the header.
    """

    name: str

    def call(self, stream: int) -> None:
        """Enqueue it on the stream with the given handle."""

    def current(self, stream: int) -> AbstractContextManager[Any]:
        """Return a context that makes a stream current, for libraries that need it."""

    def clear(self) -> None:
        """Fill the result with zeros, and wait."""

    def result(self) -> np.ndarray[Any, Any]:
        """Return the bits of the result."""


def new_product(ordinal: int, leave: int) -> Product:
    """Return torch's product if torch is installed, otherwise our kernel's.

    Args:
        ordinal: the number of the current GPU.
        leave: the multiprocessors that torch's product leaves to other kernels. Ours
            has so many blocks that it needs none.
    """
    return TorchProduct(ordinal, leave) if torch_multiplies() else OwnProduct()


def _ternary(rows: int, columns: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(rows)
    return random.integers(-1, 1, (rows, columns), endpoint=True).astype(np.float32)


class TorchProduct:
    """torch's product of square matrices of bfloat16, on tensor cores."""

    def __init__(self, ordinal: int, leave: int):
        import torch

        if leave:
            # cuBLAS launches one block for each multiprocessor. If some are occupied,
            # the last blocks start after the first have ended, and it takes twice as
            # long. Only cuBLASLt takes a number of multiprocessors.
            torch.backends.cuda.preferred_blas_library("cublaslt")
            torch._C._set_sm_carveout_experimental(leave)
        self._torch = torch
        self._device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self._device)
        matrix = torch.from_numpy(_ternary(SIDE, SIDE))
        self._a = matrix.to(self._device, torch.bfloat16)
        self._b = self._a.clone()
        self._c = torch.zeros_like(self._a)
        torch.cuda.synchronize()
        self.name = f"{SIDE} x {SIDE} bfloat16, torch {torch.__version__}"
        if leave:
            self.name += f", which leaves {leave} multiprocessors free"

    def call(self, stream: int) -> None:
        """Enqueue it on the current stream."""
        self._torch.mm(self._a, self._b, out=self._c)

    def current(self, stream: int) -> AbstractContextManager[Any]:
        """Return a context that makes a stream torch's current one."""
        cuda = self._torch.cuda
        context: AbstractContextManager[Any] = cuda.stream(
            cuda.ExternalStream(stream, device=self._device)
        )
        return context

    def clear(self) -> None:
        """Fill the result with zeros, and wait."""
        self._c.zero_()
        self._torch.cuda.synchronize()

    def result(self) -> np.ndarray[Any, Any]:
        """Return the bits of the result."""
        bits: np.ndarray[Any, Any] = self._c.view(self._torch.int16).cpu().numpy()
        return bits


class OwnProduct:
    """A product of matrices of float32, by a kernel with a thread for each element."""

    def __init__(self) -> None:
        matrix = _ternary(ROWS, INNER)
        self._a = cuda.to_device(matrix)
        self._b = cuda.to_device(np.ascontiguousarray(matrix.T))
        self._c = cuda.to_device(np.zeros((ROWS, ROWS), np.float32))
        self.name = f"{ROWS} x {INNER} x {ROWS} float32, a kernel of the benchmark"

    def call(self, stream: int) -> None:
        """Enqueue it on the stream with the given handle."""
        blocks = (ROWS // BLOCK,) * 2
        on = 0 if SIMULATED else cuda.external_stream(stream)
        _multiply[blocks, (BLOCK, BLOCK), on](self._a, self._b, self._c)

    def current(self, stream: int) -> AbstractContextManager[Any]:
        """Return an empty context."""
        return nullcontext()

    def clear(self) -> None:
        """Fill the result with zeros, and wait."""
        self._c.copy_to_device(np.zeros((ROWS, ROWS), np.float32))
        cuda.synchronize()

    def result(self) -> np.ndarray[Any, Any]:
        """Return the bits of the result."""
        bits: np.ndarray[Any, Any] = self._c.copy_to_host().view(np.uint32)
        return bits


@cuda.jit  # type: ignore[untyped-decorator]
def _multiply(a: Any, b: Any, c: Any) -> None:
    column, row = cuda.grid(2)
    total = np.float32(0)
    for k in range(a.shape[1]):
        total += a[row, k] * b[k, column]
    c[row, column] = total
