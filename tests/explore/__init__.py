"""A test scheduler: the device code itself, under many interleavings.

``source`` turns the real kernels into coroutines, ``scheduler`` decides who runs next
and ``memory`` decides what a load returns.
"""
