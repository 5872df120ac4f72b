"""The PTX instructions that kernels use, and GPUs without atomic operations.

The PTX instructions that kernels use, in one table that depends on no compiler.

``ptx.py`` makes Numba's intrinsics from it, and ``sim.py`` has a function of each name
for the simulator. Another compiler that takes inline PTX needs no more than this table.

Sources: `ld
    <https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld>`_,
`st
<https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st>`_,
`memory consistency model
<https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model>`_.

Atomic operations between GPUs: where there are none.

A GPU updates a word of another one's memory atomically only if their link supports it:
NVLink does, PCIe does not. Over PCIe, an update would be a load and a store, which may
overwrite other updates.
"""

from collections.abc import Sequence
from typing import NamedTuple

NONE, CLOCK, LOADS, STORES, UPDATES = "none", "clock", "loads", "stores", "updates"
ORDERS, MEETS, ENDS = "orders", "meets", "ends"
"""The effects of an instruction.

- ``NONE``: its result follows from its operands, so a compiler may move, repeat or
  drop it.
- ``CLOCK``: its result is the time.
- ``LOADS``, ``STORES``, ``UPDATES``: it accesses the memory at its first operand, or
  both loads and stores there as one access.
- ``ORDERS``: it orders accesses of its thread.
- ``ENDS``: its thread ends.
- ``MEETS``: threads execute it together, so no compiler may copy it into both branches
  of a condition. It orders their accesses.
"""


class Instruction(NamedTuple):
    """An instruction, or a few that are one statement of inline PTX.

    Attributes:
        name: the name by which device functions call it.
        template: its PTX. ``$0`` is the first scalar of the result, or of the operands
            if it has no result. The others follow.
        result: the types of the result's scalars; one of ``TYPES`` for each.
        operands: the same, for each operand.
        effect: its effect, one of the above.
    """

    name: str
    template: str
    result: tuple[str, ...]
    operands: tuple[tuple[str, ...], ...]
    effect: str


TYPES = ("pred", "u16", "u32", "s64", "f32", "f64")
"""``pred`` is a truth value in 32 bits. Addresses are ``s64``.

Addresses fit, and Numba would make a float of ``uint64 + int64``. Flags are ``u32``.
Data words are ``s64`` bit patterns.
"""

TABLE: dict[str, Instruction] = {}
"""By name."""


def _add(name: str, template: str, signature: str, effect: str = NONE) -> None:
    """Add an instruction; its signature is like ``"s64x2 = s64, u32"``."""
    result, _, operands = signature.partition(" = ")
    given = tuple(_scalars(each) for each in operands.split(", ") if each)
    TABLE[name] = Instruction(name, template, _scalars(result), given, effect)


def _scalars(kind: str) -> tuple[str, ...]:
    name, _, number = kind.partition("x")
    return () if name == "void" else (name,) * int(number or 1)


# Flags and records, shared with other GPUs and the host while kernels run. A ``.sys``
# access is atomic and ordered with accesses by every GPU and the host.
_add("ld_relaxed_sys_u32", "ld.relaxed.sys.global.u32 $0, [$1];", "u32 = s64", LOADS)
_add("ld_acquire_sys_u32", "ld.acquire.sys.global.u32 $0, [$1];", "u32 = s64", LOADS)
_add("ld_relaxed_sys_u64", "ld.relaxed.sys.global.u64 $0, [$1];", "s64 = s64", LOADS)
_add("ld_acquire_sys_u64", "ld.acquire.sys.global.u64 $0, [$1];", "s64 = s64", LOADS)
_WORD, _LONG = "void = s64, u32", "void = s64, s64"
_add("st_relaxed_sys_u32", "st.relaxed.sys.global.u32 [$0], $1;", _WORD, STORES)
_add("st_release_sys_u32", "st.release.sys.global.u32 [$0], $1;", _WORD, STORES)
_add("st_relaxed_sys_u64", "st.relaxed.sys.global.u64 [$0], $1;", _LONG, STORES)
_add("st_release_sys_u64", "st.release.sys.global.u64 [$0], $1;", _LONG, STORES)

# Packets: 16 bytes, of which each 8 arrive whole; as fast as the hardware moves them.
_LOADED, _STORED = "s64x2 = s64", "void = s64, s64x2"
_PAIR = "relaxed.sys.global.v2.u64"
_add("ld_relaxed_sys_v2_u64", f"ld.{_PAIR} {{$0,$1}}, [$2];", _LOADED, LOADS)
_add("st_relaxed_sys_v2_u64", f"st.{_PAIR} [$0], {{$1,$2}};", _STORED, STORES)

# Updates of one word, atomic for every GPU and the host. They return the old value.
ATOMICS = {
    "add": {"s32": "u32", "u32": "u32", "s64": "u64", "u64": "u64"},
    "min": {kind: kind for kind in ("s32", "u32", "s64", "u64")},
}
"""By operation, the type in the PTX for each kind of element."""

_FLOATS = {"f32": "f32", "f64": "f64"}
ATOMICS["add"] |= _FLOATS
ATOMICS["min"] |= _FLOATS
ATOMICS["max"] = ATOMICS["min"]
_BITS = {"s32": "b32", "u32": "b32", "s64": "b64", "u64": "b64"}
ATOMICS |= dict.fromkeys(("and", "or", "xor", "exch", "cas"), _BITS)

ATOMIC_ORDERS = ("relaxed", "acquire", "release")
LOAD_ORDERS = ATOMIC_ORDERS[:2]
_REGISTERS = {"s32": "u32", "u32": "u32", "s64": "s64", "u64": "s64"}


def atomic_name(verb: str, order: str, kind: str) -> str:
    """Return the name of an update in the table."""
    return f"atom_{verb}_{order}_sys_{kind}"


def _update(verb: str, order: str, kind: str) -> str:
    """Return the PTX of an update, whose operands begin with ``$1``."""
    atom = f"atom.{order}.sys.global"
    if verb in ("min", "max") and kind in _FLOATS:
        # There is none of floats: compare and swap, beginning with the guess 0. It is
        # IEEE 754-2019's: if either is NaN, so is the result, and -0 is less than 0.
        word = f"b{kind[1:]}"
        return (
            f"{{.reg .pred p; .reg .{word} old, new, seen; mov.{word} seen, 0;"
            f" again: mov.{word} old, seen;"
            f" {verb}.{kind} new, old, $2; setp.nan.{kind} p, old, $2;"
            f" @p add.{kind} new, old, $2; {atom}.cas.{word} seen, [$1], old, new;"
            f" setp.ne.{word} p, seen, old; @p bra again; mov.{word} $0, old;}}"
        )
    values = "$2, $3" if verb == "cas" else "$2"  # the expected, and the new one
    return f"{atom}.{verb}.{ATOMICS[verb][kind]} $0, [$1], {values};"


for _verb, _kinds in ATOMICS.items():
    for _order in ATOMIC_ORDERS:
        for _kind in _kinds:
            _register = _REGISTERS.get(_kind, _kind)
            _values = 2 if _verb == "cas" else 1
            _add(
                atomic_name(_verb, _order, _kind),
                _update(_verb, _order, _kind),
                f"{_register} = " + ", ".join(["s64", *[_register] * _values]),
                UPDATES,
            )

# Data, ordered by the flags around it.
_add("ld_v2_u64", "ld.global.v2.u64 {$0,$1}, [$2];", _LOADED, LOADS)
_add("ld_v4_u32", "ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", "u32x4 = s64", LOADS)
_add("st_v2_u64", "st.global.v2.u64 [$0], {$1,$2};", _STORED, STORES)
_add("ld_u64", "ld.global.u64 $0, [$1];", "s64 = s64", LOADS)
_add("st_u64", "st.global.u64 [$0], $1;", _LONG, STORES)
_add("ld_u32", "ld.global.u32 $0, [$1];", "u32 = s64", LOADS)
_add("st_u32", "st.global.u32 [$0], $1;", _WORD, STORES)
_add("ld_u16", "ld.global.u16 $0, [$1];", "u16 = s64", LOADS)
_add("st_u16", "st.global.u16 [$0], $1;", "void = s64, u16", STORES)
_add("ld_u8", "ld.global.u8 $0, [$1];", "u16 = s64", LOADS)
_add("st_u8", "st.global.u8 [$0], $1;", "void = s64, u16", STORES)

# Data in memory of any kind, such as the shared memory of a block.
_add("ld_any_v2_u64", "ld.v2.u64 {$0,$1}, [$2];", _LOADED, LOADS)
_add("st_any_v2_u64", "st.v2.u64 [$0], {$1,$2};", _STORED, STORES)
_add("ld_any_u64", "ld.u64 $0, [$1];", "s64 = s64", LOADS)
_add("st_any_u64", "st.u64 [$0], $1;", _LONG, STORES)
_add("ld_any_u32", "ld.u32 $0, [$1];", "u32 = s64", LOADS)
_add("st_any_u32", "st.u32 [$0], $1;", _WORD, STORES)
_add("ld_any_u16", "ld.u16 $0, [$1];", "u16 = s64", LOADS)
_add("st_any_u16", "st.u16 [$0], $1;", "void = s64, u16", STORES)
_add("ld_any_u8", "ld.u8 $0, [$1];", "u16 = s64", LOADS)
_add("st_any_u8", "st.u8 [$0], $1;", "void = s64, u16", STORES)

# The 64 bits of two words, the lower one first, from bit $3 on, which is below 64. A
# shift by 64 clears all bits.
_add(
    "bits_from",
    "{.reg .b64 low, high; .reg .u32 left; sub.u32 left, 64, $3;"
    " shr.u64 low, $1, $3; shl.b64 high, $2, left; or.b64 $0, low, high;}",
    "s64 = s64, s64, u32",
)

_add("fence_acq_rel_sys", "fence.acq_rel.sys;", "void", ORDERS)
_add("griddepcontrol_wait", "griddepcontrol.wait;", "void", ORDERS)
_START_NEXT = "griddepcontrol.launch_dependents;"
_add("griddepcontrol_launch_dependents", _START_NEXT, "void", ORDERS)
_add("exit_thread", "exit;", "void", ENDS)
_add("globaltimer", "mov.u64 $0, %globaltimer;", "s64", CLOCK)

# Conversions between bits and numbers.
_add("f32_of_bits", "mov.b32 $0, $1;", "f32 = u32")
_add("bits_of_f32", "mov.b32 $0, $1;", "u32 = f32")
_add("f64_of_bits", "mov.b64 $0, $1;", "f64 = s64")
_add("bits_of_f64", "mov.b64 $0, $1;", "s64 = f64")
_add("f32_of_f16", "cvt.f32.f16 $0, $1;", "f32 = u16")
_ABOVE_ZERO = "{.reg .b16 zero; mov.u16 zero, 0; mov.b32 $0, {zero, $1};}"
_add("f32_of_bf16", _ABOVE_ZERO, "f32 = u16")
# A float32 is rounded to 16 bits as one of a pair. Where a float is a predicate's 0 or
# 1, ptxas (13.0) loses the conversion of one alone, and stores the integer's bits.
for _kind in ("f16", "bf16"):
    _add(
        f"{_kind}_of_f32",
        "{.reg .b32 pair; .reg .b16 high;"
        f" cvt.rn.{_kind}x2.f32 pair, 0f00000000, $1;"
        " mov.b32 {$0, high}, pair;}",
        "u16 = f32",
    )
# Two 8-bit floats, the lower one first; from sm_89 on. What is too large becomes the
# largest number, because the instruction has no other mode.
for _kind in ("e4m3", "e5m2"):
    _add(
        f"f32x2_of_{_kind}x2",
        "{.reg .b32 pair; .reg .b16 low, high;"
        f" cvt.rn.f16x2.{_kind}x2 pair, $2; mov.b32 {{low, high}}, pair;"
        " cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;}",
        "f32x2 = u16",
    )
    _rounded = f"cvt.rn.satfinite.{_kind}x2.f32 $0, $2, $1;"
    _add(f"{_kind}x2_of_f32x2", _rounded, "u16 = f32, f32")

# Products that are rounded before they are added to, as NumPy's are. With ``.rn``, no
# compiler makes a fused multiply-add of them, which might differ between kernels.
_add("mul_rn_f32", "mul.rn.f32 $0, $1, $2;", "f32 = f32, f32")
_add("mul_rn_f64", "mul.rn.f64 $0, $1, $2;", "f64 = f64, f64")
# A product and a sum that are rounded once.
_add("fma_rn_f64", "fma.rn.f64 $0, $1, $2, $3;", "f64 = f64, f64, f64")

# How many bits are ones.
_add("ones_of", "popc.b32 $0, $1;", "u32 = u32")

# Barriers of some of a block's threads: which barrier, and how many threads.
_add("bar_sync", "bar.sync $0, $1;", "void = u32, u32", MEETS)
_add(
    "bar_red_or",
    "{ .reg .pred p; setp.ne.u32 p, $3, 0; bar.red.or.pred p, $1, $2, p; "
    "selp.u32 $0, 1, 0, p; }",
    "pred = u32, u32, u32",
    MEETS,
)
# Of all 32 threads of a warp; the first part orders their accesses.
_add(
    "warp_or",
    "{ .reg .pred p; bar.warp.sync 0xffffffff; setp.ne.u32 p, $1, 0; "
    "vote.sync.any.pred p, p, 0xffffffff; selp.u32 $0, 1, 0, p; }",
    "pred = u32",
    MEETS,
)
# Which of the 32 threads of a warp have a condition that holds, as bits. It orders no
# accesses.
_add(
    "votes",
    "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
    "u32 = u32",
    MEETS,
)
_FIRST_LANES = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
_add("of_first_lane", _FIRST_LANES, "u32 = u32", MEETS)
# The maximum of the numbers of 8 adjacent lanes, whose first is a multiple of 8.
_add(
    "max_of_eight",
    "{ .reg .b32 other; mov.b32 $0, $1; "
    + " ".join(
        f"shfl.sync.bfly.b32 other, $0, {lane}, 31, 0xffffffff; max.u32 $0, $0, other;"
        for lane in (1, 2, 4)
    )
    + " }",
    "u32 = u32",
    MEETS,
)


_missing: list[str] = []
"""The pairs of GPUs of this process' communicators without native atomics."""


def note_missing(pairs: Sequence[str]) -> None:
    """Refuse atomic operations in kernels that this process compiles from now on."""
    _missing.extend(pair for pair in pairs if pair not in _missing)


def refusal(name: str) -> str:
    """Return why a kernel must not call an atomic function; "" if it may."""
    if not _missing:
        return ""
    return (
        f"{name}: expected GPUs whose links have native atomics (NVLink), got none "
        f"between {', '.join(_missing)}; give each rank its own part of the peer's "
        "buffer, in which no other rank stores"
    )
