"""Everything public has a docstring."""

import inspect
from pathlib import Path
from types import FunctionType

import pytest

import numba_symm as ns
from numba_symm import device
from numba_symm.collectives import operations

METHODS = (FunctionType, classmethod, staticmethod, property)


def public():
    """Return everything public, by name, with the methods of the classes."""
    found = {name: getattr(ns, name) for name in ns.__all__}
    found |= {f"device.{name}": getattr(device, name) for name in device.__all__}
    found |= {
        f"sharing.{name}": getattr(ns.sharing, name) for name in ns.sharing.__all__
    }
    for name, value in list(found.items()):
        if inspect.isclass(value):
            found |= {
                f"{name}.{member}": there
                for member, there in vars(value).items()
                if not member.startswith("_") and isinstance(there, METHODS)
            }
    return found


def test_everything_public_has_a_docstring():
    lacking = [
        name
        for name, value in public().items()
        if not (getattr(value, "__doc__", None) or "").strip()
    ]
    assert lacking == []


def test_arrays_have_a_type_in_all_calls():
    seen = set()
    for name, call in inspect.getmembers(ns.Communicator, inspect.isfunction):
        if not name.startswith("_"):
            for each in inspect.signature(call).parameters.values():
                if each.name in ("x", "y", "out", "array"):
                    assert "numba_symm.DeviceArray" in str(each), f"{name}({each})"
                    seen.add(name)
    assert {"all_reduce", "send_init", "recv", "dot", "rendezvous"} <= seen


def test_the_package_lists_what_is_public():
    assert set(dir(ns)) == {*ns.__all__, "__version__"}


@pytest.mark.parametrize("name", operations.OPERATIONS)
def test_an_operation_is_a_method_a_plan_and_a_row_of_the_table(name):
    for method in (name, f"{name}_init"):
        assert callable(getattr(ns.Communicator, method))
    page = Path(__file__).parents[2] / "docs/collectives.md"
    table = page.read_text().partition("\n## Types and operators")[0]
    assert f"#Communicator.{name})" in table


def test_loads_and_stores_say_what_they_are():
    for name, ptx in {
        "ld_u16": "ld.global.u16",
        "ld_acquire_sys_u32": "ld.acquire.sys.global.u32",
        "st_release_sys_u64": "st.release.sys.global.u64",
        "st_v2_u64": "st.global.v2.u64",
        "st_relaxed_sys_v2_u64": "st.relaxed.sys.global.v2.u64",
    }.items():
        function = getattr(device, name)
        assert f"``{ptx}``" in function.__doc__
        assert function.__name__ == name


@pytest.mark.parametrize("name", operations.OPERATIONS)
def test_a_method_lists_its_algorithms_with_their_conditions(name):
    text = " ".join((getattr(ns.Communicator, name).__doc__ or "").split())
    if "those of :meth:`scan`" in text:
        text = " ".join(ns.Communicator.scan.__doc__.split())
    for algorithm, made in operations.OPERATIONS[name].algorithms.items():
        conditions = f" ({made.conditions})" if made.conditions else ""
        assert f'``"{algorithm}"``{conditions}' in text


def test_conditions_in_words():
    words = {
        name: operations.OPERATIONS[name].algorithms[algorithm].conditions
        for name, algorithm in (
            *(("scan", "one_shot_sentinel"), ("all_reduce", "direct")),
            *(("all_gather", "copy_engine"), ("broadcast", "direct")),
        )
    }
    assert words == {
        "scan": "floats",
        "all_reduce": "symmetric ``x`` and ``out``",
        "all_gather": "symmetric ``x`` or ``out``, at the same place",
        "broadcast": "symmetric ``x``",
    }
