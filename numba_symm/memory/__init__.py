"""Symmetric memory: allocate, export, exchange, map, validate, close.

``allocator`` contains this process' allocations, and finds them by any pointer into
them. It also has those of a communicator: which are mapped on all its ranks, and which
all ranks have dropped. ``symmetric`` is the result of a rendezvous.
"""
