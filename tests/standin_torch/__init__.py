"""A stand-in for torch, where it is not installed: what numba_symm/torch.py uses of it.

Its tensors are NumPy's arrays in memory of the CPU. Beside what that module uses, it
has what the programs of test_torch.py use, and nothing else. A name is that of torch's
2.13 and has torch's parameters, or fewer; test_torch.py compares both where torch is
installed. Names that begin with ``own_`` are the stand-in's.
"""

import contextlib
import operator

import ml_dtypes
import numpy as np


class own_Named:
    def __init__(self, name):
        self.own_name = name

    def __repr__(self):
        return f"torch.{self.own_name}"


class dtype(own_Named):  # torch.dtype
    pass


class layout(own_Named):  # torch.layout
    pass


own_types = {
    np.dtype(getattr(ml_dtypes, name, name)): dtype(name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16"),
        *("float32", "float64", "complex64", "complex128", "float8_e4m3fnuz"),
    )
}
own_numpys = {each: numpys for numpys, each in own_types.items()}
globals().update({each.own_name: each for each in own_numpys})
strided, sparse_coo = layout("strided"), layout("sparse_coo")


class device:  # torch.device
    def __init__(self, type, index=None):
        self.type, self.index = type, index


def own_reading(function):
    """Return a method that reads a tensor's array."""
    return lambda self: function(self.own_array)


def own_operation(function):
    """Return a method that makes a tensor by a function of NumPy."""

    def method(self, *others):
        arrays = [getattr(each, "own_array", each) for each in (self, *others)]
        return Tensor(np.asarray(function(*arrays)))

    return method


class Tensor:  # torch.Tensor, which torch makes by functions only
    requires_grad = is_cuda = False

    def __init__(self, array, device=device("cpu"), layout=strided, neg=False):  # noqa: B008
        self.own_array, self.own_neg = array, neg
        self.device, self.layout = device, layout

    is_cpu = property(lambda self: self.device.type == "cpu")
    dtype = property(lambda self: own_types[self.own_array.dtype])
    shape = property(own_reading(np.shape))
    __len__ = own_reading(len)
    data_ptr = own_reading(operator.attrgetter("ctypes.data"))
    dim = own_reading(np.ndim)
    element_size = own_reading(operator.attrgetter("itemsize"))
    get_device = own_reading(lambda array: -1)
    is_conj = own_reading(lambda array: False)
    is_contiguous = own_reading(operator.attrgetter("flags.c_contiguous"))
    numel = own_reading(np.size)
    tolist = own_reading(np.ndarray.tolist)
    __add__ = own_operation(np.add)
    __mul__ = mul = own_operation(np.multiply)
    detach = own_operation(np.asarray)
    remainder = own_operation(np.remainder)
    t = own_operation(np.transpose)

    def __getitem__(self, index):  # always a view
        return Tensor(self.own_array[(*np.index_exp[index], ...)])

    def chunk(self, chunks):
        rows = -(-len(self) // chunks)
        return [self[start : start + rows] for start in range(0, len(self), rows)]

    def contiguous(self):
        return self if self.is_contiguous() else Tensor(self.own_array.copy("C"))

    def copy_(self, src):
        self.own_array[...] = src.own_array
        return self

    def is_neg(self):
        return self.own_neg

    def record_stream(self, stream):
        raise NotImplementedError

    def reshape(self, *shape):
        return Tensor(self.own_array.reshape(shape))

    def stride(self):
        return tuple(each // self.element_size() for each in self.own_array.strides)

    def to(self, dtype):
        return Tensor(self.own_array.astype(own_numpys[dtype]))

    def to_sparse(self):
        return Tensor(self.own_array.copy(), layout=sparse_coo)

    def view(self, *shape):
        if isinstance(shape[0], dtype):
            return Tensor(self.own_array.view(own_numpys[shape[0]]))
        if not self.is_contiguous():
            raise RuntimeError("view size is not compatible with input tensor's size")
        return self.reshape(*shape)


def own_new(array, dtype, where="cpu"):
    default = "float32" if array.dtype == "float64" else array.dtype
    return Tensor(array.astype(own_numpys.get(dtype, default)), device(where))


def arange(*range, dtype=None):
    return own_new(np.arange(*range), dtype)


def cat(tensors):
    return Tensor(np.concatenate([each.own_array for each in tensors]))


def full(size, fill_value, *, dtype=None):
    return own_new(np.full(size, fill_value), dtype)


def ones(*size, device="cpu"):
    return own_new(np.ones(size), None, device)


def tensor(data):
    return own_new(np.array(data), None)


def zeros(*size, dtype=None):
    return own_new(np.zeros(size), dtype)


def _neg_view(input):
    return Tensor(input.own_array, neg=True)


class nn:  # torch.nn
    class Parameter(Tensor):  # torch.nn.Parameter
        requires_grad = True

        def __init__(self, data):
            super().__init__(data.own_array)


class _C:  # torch._C
    class Future:  # torch._C.Future
        def __init__(self, devices):
            self.own_values = []

        def set_result(self, result):
            self.own_values.append(result)

        def wait(self):
            (result,) = self.own_values  # none: torch waits; two: it raises
            return result


class cuda:  # torch.cuda, of torch without CUDA
    def stream(stream):
        assert stream is None
        return contextlib.nullcontext()
