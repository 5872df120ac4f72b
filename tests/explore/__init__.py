"""The explorer: it runs the source of the kernels under many interleavings.

``source`` turns the kernels into coroutines, ``scheduler`` chooses the thread that runs
next, and ``memory`` the value that a load returns.
"""
