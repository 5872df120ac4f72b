"""Symmetric memory: allocate, export, exchange, map, validate, close.

``allocator`` is this process' part: blocks, found from any pointer inside them.
``heap`` is a communicator's: which blocks are mapped on all its ranks, and when all
have dropped one. ``symmetric`` is what a rendezvous gives.
"""
