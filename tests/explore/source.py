"""The device code's real text, executed as coroutines, with edits for broken variants.

Modules are read from their files. In every device function (decorated as one, or made
within a ``make_…``) a call ``f(x)`` becomes, in effect, ``yield from f(x)`` where ``f``
may stop; nothing else changes. Imports of the intrinsics and of ``numba.cuda`` find the
scheduler's, and the workspace is as small as the scheduler needs it. Names may be used
through modules: ``lanes.load(…)`` is ``load(…)``, and so are decorators. A decorator
refuses a function that does not stop.
"""

import ast
import builtins
import functools
import importlib.util
import pkgutil
from pathlib import Path
from types import CodeType, FunctionType, GeneratorType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from explore import intrinsics
from explore.launches import Launch
from explore.markers import Edit, marked
from numba_symm.collectives import kernels
from numba_symm.collectives.operations import OPERATIONS
from numba_symm.collectives.select import Algorithm


class Shape(NamedTuple):
    """How much of everything there is.

    Attributes:
        threads: of a block.
        blocks: of a call, at most.
        vectors: how many a thread has slots for, all other ranks taken together.
    """

    threads: int
    blocks: int
    vectors: int


SMALL = Shape(2, 2, 2)
"""A few show every race; two ranks send two vectors each, more ranks one."""

_KERNELS = [
    module.name
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}.")
]
"""In any order, as none imports another."""

_MODULES = (
    "numba_symm.collectives.protocols.workspace",
    "numba_symm.collectives.protocols.binding",
    "numba_symm.collectives.protocols.partition",
    "numba_symm.device.polling",
    "numba_symm.device.arithmetic",
    "numba_symm.device.lanes",
    "numba_symm.device.puts",
    "numba_symm.device.signals",
    "numba_symm.device.barriers",
    "numba_symm.device.groups",
    "numba_symm.device.order",
    "numba_symm.device.packets",
    "numba_symm.device.block_exchange",
    "numba_symm.collectives.protocols.finishing",
    "numba_symm.collectives.protocols.exchanges",
    "numba_symm.collectives.protocols.mailboxes",
    "numba_symm.collectives.protocols.flags",
    "numba_symm.collectives.protocols.slots",
    "numba_symm.collectives.protocols.credit",
    "numba_symm.collectives.protocols.tokens",
    "numba_symm.collectives.protocols.few_tokens",
    "numba_symm.collectives.protocols.handshake",
    "numba_symm.collectives.protocols.copies",
    *_KERNELS,
    "numba_symm.memory.pads",
    "numba_symm.engines.deadline",
    "numba_symm.collectives.select",
    "numba_symm.collectives.operations",
    "explore.programs",
)
"""In the order of their imports."""

_PACKAGES = (
    "numba_symm",
    "numba_symm.collectives",
    "numba_symm.collectives.kernels",
    "numba_symm.collectives.protocols",
    "numba_symm.device",
    "numba_symm.engines",
)

_NEVER_STOP = {"range", "len", "min", "max", "int", "word_of"}  # merely for speed


class _Kernel:
    """A substitute for ``numba_symm.gpu.kernels.Kernel``, with our launches."""

    def __init__(
        self,
        factory: Any,
        constants: Any,
        signature: Any,
        threads: int,
        held: int = 1,
        registers: int = 64,
    ):
        self.held = held
        self._function = intrinsics.device_function(factory(*constants))

    def bind(self, grid: int, *args: Any, held: int = 1, early: bool = False) -> Launch:
        return Launch(self._function, grid, args, held=held, early=early)


class _Stopping(ast.NodeTransformer):
    """Lets every call in a device function stop."""

    decorators = frozenset({"device_function", "array_function", "sliced"})

    def __init__(self, file: str) -> None:
        self._file = file
        self._kernels = False  # inside of a factory
        self._device = False  # inside of a device function

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        outer = self._kernels, self._device
        decorators = set(map(_last_name, node.decorator_list))
        self._device = self._kernels or not self.decorators.isdisjoint(decorators)
        if self._device:
            line = min(each.lineno for each in (node, *node.decorator_list))
            intrinsics.stepped.add((self._file, line))
        self._kernels = node.name.startswith("make_")
        node.body = [self.visit(statement) for statement in node.body]
        self._kernels, self._device = outer
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not self._device or _last_name(node) in _NEVER_STOP:
            return node
        template = "(yield from _r) if type(_r := call) is _generator else _r"
        expression: Any = ast.parse(template, mode="eval").body
        for part in ast.walk(expression):
            ast.copy_location(part, node)
        expression.test.left.args[0].value = node
        return expression


class _StoppingAtElements(_Stopping):
    """Does so in kernels of users, and at loads and stores of elements, too."""

    decorators = frozenset({"jit"})

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if not self._device or not isinstance(node.ctx, ast.Load):
            return node
        template = "(yield from array.load(index)) if hasattr(array, 'load') else item"
        return self._filled(template, node, item=node)

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        self.generic_visit(node)
        target = node.targets[0]
        if not self._device or not isinstance(target, ast.Subscript):
            return node
        template = "(yield from array.store(index, value))"
        return ast.Expr(self._filled(template, target, value=node.value))

    def _filled(self, template: str, of: ast.Subscript, **parts: Any) -> Any:
        """Return an expression with an element's parts in the place of their names."""
        parts |= {"array": of.value, "index": of.slice}
        expression = ast.parse(template, mode="eval").body
        for node in ast.walk(expression):
            ast.copy_location(node, of)
        return _Filled(parts).visit(expression)


def _last_name(node: ast.expr) -> str | None:
    """Return ``f`` for ``f``, ``module.f``, ``f(x)`` and ``module.f(x)``."""
    called = node.func if isinstance(node, ast.Call) else node
    return getattr(called, "attr", getattr(called, "id", None))


class _Filled(ast.NodeTransformer):
    """Puts expressions in the place of names."""

    def __init__(self, parts: dict[str, ast.expr]) -> None:
        self._parts = parts

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._parts.get(node.id, node)


class _Copy(NamedTuple):
    """A substitute for ``numba_symm.gpu.streams.Copy``."""

    target: int
    source: int
    nbytes: int

    def __call__(self, stream: Any) -> None:
        stream.copy(*self)


def device_code(*edits: Edit, shape: Shape = SMALL) -> SimpleNamespace:
    """Return the modules by their last names, with edits at their markers.

    The ``shape`` is an attribute, too. The table of operations has the algorithms that
    were added to the library's own, and their kernels' modules are executed, too.
    """
    entries = tuple(
        (name, algorithm, made)
        for name, operation in OPERATIONS.items()
        for algorithm, made in operation.algorithms.items()
    )
    return _device_code(edits, shape, entries)


def paths() -> dict[str, Path]:
    """Return the modules' files by their last names."""
    return {
        name.rpartition(".")[2]: Path(importlib.util.find_spec(name).origin)
        for name in _MODULES
    }


def _explored(bind: Any, known: dict[str, Any]) -> Any:
    """Return what binds an algorithm, made of the functions of explored modules."""
    if isinstance(bind, functools.partial):
        return functools.partial(
            *(_explored(each, known) for each in (bind.func, *bind.args))
        )
    found = isinstance(bind, FunctionType)
    return getattr(known[bind.__module__], bind.__name__) if found else bind


@functools.cache
def _device_code(
    edits: tuple[Edit, ...],
    shape: Shape,
    entries: tuple[tuple[str, str, Algorithm], ...],
) -> SimpleNamespace:
    compiled = ModuleType("kernels")
    compiled.GUARD, compiled.Kernel, compiled.Launch = None, _Kernel, Launch
    compiled.simulate = None
    numba = ModuleType("numba")
    numba.cuda = intrinsics.cuda
    environment = ModuleType("environment")
    environment.SIMULATED = True
    streams = ModuleType("streams")
    streams.Copy = _Copy
    known: dict[str, Any] = {"numba": numba}
    find = _finder(known)
    add = functools.partial(_add, known)
    for name in _PACKAGES:
        add(name, ModuleType(name))
    add("numba_symm.gpu.streams", streams)
    add("numba_symm.device.intrinsics", intrinsics)
    add("numba_symm.device.checks", intrinsics)
    add("numba_symm.environment", environment)
    add("numba_symm.gpu.kernels", compiled)
    binds = (made.bind for _, _, made in entries)
    theirs = (getattr(bind, "func", bind).__module__ for bind in binds)
    modules = dict.fromkeys((*_MODULES, *theirs))
    for name in modules:
        last = name.rpartition(".")[2]
        mine = tuple(edit for edit in edits if edit.module == last)
        module = _execute(name, mine, find)
        add(name, module)
        if last == "workspace":
            _shrink(module, shape)
        if last == "message_copy":
            module.THREADS, module.MOST_BLOCKS = shape.threads, shape.blocks
            module.LOOKS = 2
        if last == "partition":
            module.LINE = 1  # shards of any number of vectors
        if last == "few_tokens":
            module.MOST = 2  # so that some calls have as many
    table = known["numba_symm.collectives.operations"].OPERATIONS
    for operation, algorithm, made in entries:
        if algorithm not in table[operation].algorithms:
            found = made._replace(bind=_explored(made.bind, known))
            table[operation].algorithms[algorithm] = found
    last_names = {name.rpartition(".")[2]: known[name] for name in modules}
    assert {edit.module for edit in edits} <= set(last_names)
    return SimpleNamespace(**last_names, shape=shape, find=find)


def _add(known: dict[str, Any], name: str, module: Any) -> None:
    """Let imports find a module by its name, and as an attribute of its package."""
    known[name] = module
    package, _, last = name.rpartition(".")
    if package in known:
        setattr(known[package], last, module)


def _finder(known: dict[str, Any]) -> Any:
    """Return an ``__import__`` that prefers the modules of ``known``."""

    def find(name: str, *rest: Any) -> Any:
        if name not in known:
            return __import__(name, *rest)
        _, _, wanted, _ = rest
        # As ``import a.b as c`` takes the attributes of ``a`` itself.
        return known[name if wanted else name.partition(".")[0]]

    return find


def program(path: Path, code: SimpleNamespace, *edits: tuple[str, str]) -> ModuleType:
    """Return a program of a user, whose kernels use ``code``.

    Args:
        path: the program's file.
        code: the device code.
        edits: texts that the file has once, each with what replaces it.
    """
    text = path.read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"expected {old!r} once, got {text.count(old)}"
        text = text.replace(old, new)
    package = ModuleType("numba_symm")
    package.device = SimpleNamespace(**vars(code.signals) | vars(code.barriers))
    numba = ModuleType("numba")
    numba.cuda = intrinsics.cuda
    mpi = ModuleType("mpi4py")
    mpi.MPI = None
    find = _finder({"numba_symm": package, "numba": numba, "mpi4py": mpi})
    stopping = _StoppingAtElements(str(path))
    tree = ast.fix_missing_locations(stopping.visit(ast.parse(text)))
    return executed(path.stem, compile(tree, str(path), "exec"), find)


def _shrink(workspace: ModuleType, shape: Shape) -> None:
    threads, blocks, vectors = shape
    workspace.TILE_BYTES = threads * workspace.VECTOR
    workspace.THREADS = workspace.WIDE = threads
    workspace.MAX_BLOCKS = blocks
    workspace.MOST_BLOCKS = 4 * max(threads, blocks)
    small = workspace.Protocol(blocks, vectors)
    workspace.CHUNKED = small
    workspace._MOST_TILES = vectors
    tile = workspace.TILE_BYTES
    tile_bytes = {
        "sentinel": tile,
        "marked": tile + max(workspace.VECTOR, workspace.MARK * threads),
        "ll": 2 * tile,
    }
    protocols = {
        name: small._replace(tile_bytes=nbytes) for name, nbytes in tile_bytes.items()
    }
    for table in ("ONE_SHOT", "TWO_SHOT"):
        names = getattr(workspace, table)
        setattr(workspace, table, {name: protocols[name] for name in names})


def _execute(name: str, edits: tuple[Edit, ...], find: Any) -> ModuleType:
    names = {name for edit in edits for name in edit.names}
    put_in = {
        name: getattr(intrinsics, name) for name in names if hasattr(intrinsics, name)
    }
    return executed(name, _compiled(name, edits), find, put_in)


@functools.cache
def _compiled(name: str, edits: tuple[Edit, ...]) -> CodeType:
    """Return a module's code, which most edits leave as it is."""
    path = importlib.util.find_spec(name).origin
    return compiled(Path(path).read_text(), path, edits)


def compiled(text: str, path: str, edits: tuple[Edit, ...] = ()) -> CodeType:
    """Return the code of a module's text, whose device functions stop."""
    tree = ast.parse(text)
    places = marked(text, tree) if edits else {}
    for edit in edits:
        edit.apply(tree, places)
    tree = ast.fix_missing_locations(_Stopping(path).visit(tree))
    return compile(tree, path, "exec")


def executed(name: str, code: CodeType, find: Any, more: Any = ()) -> ModuleType:
    """Return the module of its code, with other imports and with more builtin names."""
    module = ModuleType(name)
    module.__builtins__ = {**vars(builtins), "__import__": find, **dict(more)}
    module._generator = GeneratorType
    exec(code, vars(module))
    return module
