"""Symmetric memory: allocate, export, exchange, map, validate, close.

``allocator`` has this process' allocations, found from any pointer into them. ``heap``
is a communicator's: which allocations are mapped on all its ranks, and when all have
dropped one. ``symmetric`` is what a rendezvous returns.
"""
