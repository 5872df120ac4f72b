"""The operations of a communicator of several islands.

Each consists of steps, which are enqueued one after another: kernels within the island,
exchanges with the engine, and kernels that combine the received data.
"""
