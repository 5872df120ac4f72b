import numpy as np
from cuda.core import Device
from mpi4py import MPI
from numba import config, cuda

import numba_symm as ns

if config.ENABLE_CUDASIM:
    raise SystemExit("graph.py: expected GPUs; the simulator has no graphs")

with ns.Communicator(MPI.COMM_WORLD) as comm:
    x = comm.empty(4, np.float32)
    x.copy_to_device(np.full(4, comm.rank, np.float32))
    stream = Device().create_stream()
    with cuda.defer_cleanup():  # Numba frees no memory during the capture
        builder = stream.create_graph_builder().begin_building()
        comm.all_reduce(x, out=x, stream=builder.stream)
        graph = builder.end_building().complete()
    for _ in range(3):  # the same number on every rank
        graph.launch(stream)
    comm.synchronize(stream)
    print(comm.rank, x.copy_to_host())
