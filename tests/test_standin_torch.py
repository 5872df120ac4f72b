"""The stand-in for torch compared with torch, where that is installed."""

import enum
import inspect
import re
from types import ModuleType

import pytest

from tests import standin_torch
from tests.standin_torch import distributed

torch = pytest.importorskip("torch", minversion="2.13")


def parameters(function):
    """Return the names of parameters, for each form in which a function is called."""
    try:
        return [[*inspect.signature(function).parameters]]
    except ValueError:  # written in C++: the docstring has them
        lines = re.findall(r"^(?:\d+\. )?\w+\((.*)\)", function.__doc__ or "", re.M)
        return [re.findall(r"(?:^|, )\*{,2}(\w+)", line) for line in lines]


def accepts(form, function):
    """Return whether parameters have those of the stand-in among them, in order."""
    found = inspect.signature(function).parameters.values()
    names = [x.name for x in found if x.kind != x.VAR_POSITIONAL and x.name != "self"]
    if "arg0" in form:  # they have no names
        return len(names) < len(form)
    return "args" in form or [each for each in form if each in names] == names


def names(place):
    """Return what a class or module of the stand-in has under torch's names."""
    return {
        name: getattr(place, name)
        for name, each in vars(place).items()
        if not name.startswith(("own_", "__")) or name == "__init__"
        if not isinstance(each, ModuleType)
        if (getattr(each, "__module__", None) or "tests").startswith("tests")
    }


PLACES = [(standin_torch, torch), (distributed, torch.distributed)]
for ours, real in PLACES:  # it grows
    pairs = [(x, getattr(real, name, None)) for name, x in names(ours).items()]
    PLACES += [pair for pair in pairs if isinstance(pair[0], type)]


@pytest.mark.parametrize(("ours", "real"), PLACES, ids=[x.__name__ for x, _ in PLACES])
def test_names_and_parameters_are_torch_s(ours, real):
    for each in ours if isinstance(ours, enum.EnumType) else ():
        assert hash(each) == hash(getattr(real, each.name))
    for name, each in {} if isinstance(ours, enum.EnumType) else names(ours).items():
        other = getattr(real, name)
        if callable(each) and callable(other) and not isinstance(each, type):
            forms = parameters(other)
            assert not forms or any(accepts(form, each) for form in forms), name
    for field in getattr(ours, "__slots__", ()):
        value = getattr(real(), field)
        assert hash(getattr(ours(), field, value)) == hash(value), field


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t.arange(12.0).reshape(3, 4).t(),
        lambda t: t.arange(12.0).reshape(3, 4).t().contiguous(),
        lambda t: t.arange(12.0).reshape(3, 4)[1:, 1:3] * 2 + t.ones(2),
        lambda t: t.arange(12.0).reshape(3, 4).chunk(2)[1].view(-1),
        lambda t: t.arange(1, 12).remainder(4).mul(3).to(t.uint8),
        lambda t: t.full((2, 3), 1.5).copy_(t.ones(2, 3)).view(t.uint8),
        lambda t: t.cat([t.tensor([1, 2]), t.full((2,), 3)])[2],
        lambda t: t.nn.Parameter(t.zeros(2, dtype=t.bfloat16)).detach(),
        lambda t: t._neg_view(t.ones(2, 3)),
    ],
)
def test_a_tensor_is_torch_s(operation):
    ours, real = operation(standin_torch), operation(torch)
    assert ours.shape == real.shape
    assert ours.is_neg() or ours.tolist() == real.tolist()
    for name in ("dtype", "layout", "is_cpu", "is_cuda", "requires_grad"):
        assert str(getattr(ours, name)) == str(getattr(real, name)), name
    reads = "dim element_size get_device is_conj is_contiguous is_neg numel stride"
    for name in reads.split():
        assert getattr(ours, name)() == getattr(real, name)(), name
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        standin_torch.arange(6).reshape(2, 3).t().view(-1)
