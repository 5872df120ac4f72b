"""Our plain calls on torch's tensors and torch's current stream."""

from typing import Any

from numba_symm.bench.contenders import imported, need_gpus
from numba_symm.bench.contenders.on_arrays import OnArrays

check = need_gpus


def make(comm: Any, ranks: Any) -> OnArrays:
    """Return the contender."""
    torch = imported("torch", "pip install torch")
    gpu = torch.device("cuda", comm.device.ordinal)

    def current(handle: int) -> Any:
        return torch.cuda.stream(torch.cuda.ExternalStream(handle, device=gpu))

    return OnArrays(
        "on-torch",
        comm,
        f"numba_symm on tensors of torch {torch.__version__}",
        lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=gpu),
        lambda array, dtype: torch.as_tensor(array, device=gpu).view(
            getattr(torch, dtype.name)
        ),
        current,
    )
