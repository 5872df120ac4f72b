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


def accepts(form, wanted):
    """Return whether parameters have other ones among them, in the same order."""
    if "arg0" in form:  # they have no names
        return len(wanted) < len(form)
    return "args" in form or [each for each in form if each in wanted] == wanted


def own(function):
    """Return the named parameters of the stand-in's function."""
    found = inspect.signature(function).parameters.values()
    return [x.name for x in found if x.kind != x.VAR_POSITIONAL and x.name != "self"]


def names(place):
    """Return what a class or module of the stand-in has under torch's names."""
    return {
        name: each
        for name, each in vars(place).items()
        if not name.startswith(("own_", "__")) or name == "__init__"
        if not isinstance(each, ModuleType)
        if (getattr(each, "__module__", None) or "tests").startswith("tests")
    }


PLACES = [(standin_torch, torch), (distributed, torch.distributed)]
for ours, real in PLACES:  # it grows
    PLACES += [
        (each, getattr(real, name))
        for name, each in names(ours).items()
        if isinstance(each, type) and hasattr(real, name)
    ]


@pytest.mark.parametrize(("ours", "real"), PLACES, ids=[x.__name__ for x, _ in PLACES])
def test_names_and_parameters_are_torch_s(ours, real):
    if isinstance(ours, enum.EnumType):
        for each in ours:
            assert hash(each) == hash(getattr(real, each.name))
        return
    for name, each in names(ours).items():
        other = getattr(real, name)
        forms = parameters(other) if callable(each) and callable(other) else []
        if forms and not isinstance(each, type):
            assert any(accepts(form, own(each)) for form in forms), (name, forms)
    for field in getattr(ours, "__slots__", ()):
        value = getattr(real(), field)
        assert hash(getattr(ours(), field, value)) == hash(value), field


OPERATIONS = (
    lambda t: t.arange(12.0).reshape(3, 4).t(),
    lambda t: t.arange(12.0).reshape(3, 4).t().contiguous(),
    lambda t: t.arange(12.0).reshape(3, 4)[1:, 1:3] * 2 + t.ones(2),
    lambda t: t.arange(12.0).reshape(3, 4).chunk(2)[1].view(-1),
    lambda t: t.arange(1, 12).remainder(4).mul(3).to(t.uint8),
    lambda t: t.full((2, 3), 1.5).copy_(t.ones(2, 3)).view(t.uint8),
    lambda t: t.cat([t.tensor([1, 2]), t.full((2,), 3)])[2],
    lambda t: t.nn.Parameter(t.zeros(2, dtype=t.bfloat16)).detach(),
)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_tensor_is_torch_s(operation):
    ours, real = operation(standin_torch), operation(torch)
    assert ours.tolist() == real.tolist()
    assert ours.shape == real.shape
    for name in ("dtype", "layout", "is_cpu", "is_cuda", "requires_grad"):
        assert str(getattr(ours, name)) == str(getattr(real, name)), name
    for name in (
        *("dim", "element_size", "get_device", "is_conj", "is_contiguous"),
        *("is_neg", "numel", "stride"),
    ):
        assert getattr(ours, name)() == getattr(real, name)(), name
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        standin_torch.arange(6).reshape(2, 3).t().view(-1)
