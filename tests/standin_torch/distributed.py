"""The stand-in for torch.distributed."""

import contextlib
import enum
import functools
import inspect
import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote


class FileStore:  # torch.distributed.FileStore; here, each key has a file
    def __init__(self, file_name, world_size=-1):
        self.own_folder = Path(f"{file_name}-keys")
        self.own_folder.mkdir(exist_ok=True)

    def own_path(self, key):
        return self.own_folder / quote(key, safe="")

    def add(self, key, amount):  # here, only one rank may add to a key
        amount += int(self.get(key)) if self.check([key]) else 0
        self.set(key, str(amount))
        return amount

    def check(self, keys):
        return all(self.own_path(key).exists() for key in keys)

    def get(self, key):  # which exists: else torch waits
        return self.own_path(key).read_bytes()

    def set(self, key, value):
        new = self.own_folder / f"new {os.getpid()}"
        new.write_bytes(value.encode() if isinstance(value, str) else value)
        new.replace(self.own_path(key))


class Work:  # torch.distributed.Work
    pass


class ReduceOp:  # torch.distributed.ReduceOp
    class RedOpType(enum.Enum):  # torch.distributed.ReduceOp.RedOpType
        SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM = range(9)

        def __hash__(self):
            return self.value

    SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM = RedOpType

    def __init__(self, op):
        self.op = getattr(op, "op", op)

    def __hash__(self):
        return hash(self.op)


def _make_nccl_premul_sum(factor):
    return ReduceOp(ReduceOp.PREMUL_SUM)


def own_options(**fields):
    """Return a class of options, which takes no others."""
    fields |= {"asyncOp": True, "timeout": timedelta(milliseconds=-1)}

    def init(self):
        for field, value in fields.items():
            setattr(self, field, value)

    return type("Options", (), {"__slots__": tuple(fields), "__init__": init})


own_LONG = timedelta(minutes=30)
own_SUM = {"reduceOp": ReduceOp(ReduceOp.SUM)}
AllreduceCoalescedOptions = own_options(**own_SUM)
AllreduceOptions = own_options(**own_SUM)  # torch.distributed.AllreduceOptions, etc.
AllToAllOptions = own_options()
BarrierOptions = own_options()
BroadcastOptions = own_options(rootRank=0)
GatherOptions = own_options(rootRank=0)
ReduceOptions = own_options(**own_SUM, rootRank=0)
ReduceScatterOptions = own_options(**own_SUM)
ScatterOptions = own_options(rootRank=0)


class ProcessGroup:  # torch.distributed.ProcessGroup
    def __init__(self, rank, size):
        self.own_place = rank, size

    def rank(self):
        return self.own_place[0]

    def size(self):
        return self.own_place[1]

    def _set_group_name(self, arg0):  # torch calls what a subclass has of this name
        self.setGroupName(arg0)


class Backend:  # torch.distributed.Backend
    @classmethod
    def register_backend(cls, name, func, extended_api=False, devices=None):
        assert (name, extended_api, devices) == ("symm", True, ["cpu"])
        own_world.own_create = func


class group:  # torch.distributed.group
    WORLD = None


class distributed_c10d:  # torch.distributed.distributed_c10d
    AllgatherOptions = own_options()

    class _DistributedBackendOptions:
        __slots__ = "group_rank", "group_size", "store", "timeout"

    class _world:
        group_count, pg_coalesce_state, pg_group_ranks, pg_map = 0, {}, {}, {}


own_group, own_world = group, distributed_c10d._world


def own_new_group(ranks, timeout, backend, options, me, store):
    name, own_world.group_count = own_world.group_count, own_world.group_count + 1
    if me not in ranks:
        return object()  # torch has a mark for it
    assert backend == "symm"
    given = distributed_c10d._DistributedBackendOptions()
    given.store = FileStore(store.own_folder / str(name))  # torch: with a prefix
    given.group_rank, given.group_size = ranks.index(me), len(ranks)
    given.timeout = timeout
    made = own_world.own_create(given, options)
    made._set_group_name(str(name))
    own_world.pg_map[made] = backend, given.store
    own_world.pg_group_ranks[made] = {rank: n for n, rank in enumerate(ranks)}
    return made


def init_process_group(backend, timeout, world_size, rank, store):
    ranks = range(world_size)
    group.WORLD = own_new_group(ranks, timeout, backend, None, rank, store)


def new_group(ranks=None, timeout=None, backend=None, pg_options=None):
    world, (_, store) = group.WORLD, own_world.pg_map[group.WORLD]
    ranks, timeout = sorted(ranks or range(world.size())), timeout or own_LONG
    return own_new_group(ranks, timeout, backend, pg_options, world.rank(), store)


def destroy_process_group(group=None):
    for each in [group] if group else [*own_world.pg_map][::-1]:
        each.shutdown()
        del own_world.pg_map[each], own_world.pg_group_ranks[each]
    if group is None:
        own_group.WORLD, own_world.group_count = None, 0


def own_ended(work, async_op):
    """Return the work of a call, or wait for it."""
    return work if async_op or work is None else work.wait() and None


def own_function(method, options, parameters):
    """Return a function of torch. Complex tensors stay what they are.

    Args:
        method: the group's that it calls.
        options: the class of the options that it passes.
        parameters: the names of its own, before ``group``. Those in brackets are
            passed in a list.
    """
    roles = parameters.split()
    names = [each.strip("[]") for each in roles]
    signature = inspect.Signature(
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in (*names, "group", "async_op")
    )

    def call(*args, **named):
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        *own, where, async_op = bound.arguments.values()
        where, made, tensors = where or group.WORLD, options(), []
        made.asyncOp = bool(async_op)
        for role, name, value in zip(roles, names, own, strict=True):
            if name == "op":
                made.reduceOp = ReduceOp(value or ReduceOp.SUM)
            elif name in ("src", "dst"):
                made.rootRank = own_world.pg_group_ranks[where][value or 0]
            elif value is None:
                tensors.append([])
            else:
                tensors.append([value] if role != name else value)
        if method == "gather":
            tensors.reverse()
        calls = own_world.pg_coalesce_state.get(where)
        if calls is not None and f"{method}_coalesced" in own_together:
            calls.append((f"{method}_coalesced", made, tensors))
            return None  # for async_op, torch returns a work that refuses every use
        return own_ended(getattr(where, method)(*tensors, made), async_op)

    call.__signature__ = signature
    return call


own_gathers = distributed_c10d.AllgatherOptions
all_gather = own_function("allgather", own_gathers, "[tensor_list] [tensor]")
all_gather_single = own_function(
    "all_gather_single", own_gathers, "output_tensor input_tensor"
)
all_reduce = own_function("allreduce", AllreduceOptions, "[tensor] op")
all_to_all = own_function(
    "alltoall", AllToAllOptions, "output_tensor_list input_tensor_list"
)
all_to_all_single = own_function(
    "all_to_all_single",
    AllToAllOptions,
    "output input output_split_sizes input_split_sizes",
)
broadcast = own_function("broadcast", BroadcastOptions, "[tensor] src")
gather = own_function("gather", GatherOptions, "[tensor] [gather_list] dst")
reduce = own_function("reduce", ReduceOptions, "[tensor] dst op")
reduce_scatter = own_function(
    "reduce_scatter", ReduceScatterOptions, "[output] [input_list] op"
)
reduce_scatter_single = own_function(
    "reduce_scatter_single", ReduceScatterOptions, "output input op"
)
scatter = own_function("scatter", ScatterOptions, "[tensor] [scatter_list] src")
all_gather_into_tensor, reduce_scatter_tensor = all_gather_single, reduce_scatter_single
own_together = {
    "allreduce_coalesced": AllreduceCoalescedOptions,
    "all_gather_single_coalesced": own_gathers,
    "reduce_scatter_single_coalesced": ReduceScatterOptions,
}


@contextlib.contextmanager
def _coalescing_manager(group=None, device=None, async_ops=False):
    calls = own_world.pg_coalesce_state.setdefault(group, [])
    if device:
        group._start_coalescing(device)
    block, work = SimpleNamespace(), None
    yield block  # after an exception, torch ends nothing
    del own_world.pg_coalesce_state[group]
    if calls:
        name, first, _ = calls[0]
        options = own_together[name]()
        options.asyncOp = async_ops
        if "reduce" in name:
            options.reduceOp = first.reduceOp
        lists = [[*each] for each in zip(*(each[2] for each in calls), strict=True)]
        if name == "allreduce_coalesced":
            lists = [[tensor for (tensor,) in lists[0]]]
        work = getattr(group, name)(*lists, options)
    if device:
        work = group._end_coalescing(device)
    if work is not None:
        block.wait = work.wait
        own_ended(work, async_ops)


def barrier(group=None, async_op=False, device_ids=None, timeout=None):
    options = BarrierOptions()
    options.asyncOp, options.timeout = async_op, timeout or options.timeout
    return own_ended(group.barrier(opts=options), async_op)


def isend(tensor, dst=None, group=None, tag=0):
    return group.send([tensor], own_world.pg_group_ranks[group][dst], tag)


def irecv(tensor, src=None, group=None, tag=0):
    if src is None:
        return group.recv_anysource([tensor], tag)
    return group.recv([tensor], own_world.pg_group_ranks[group][src], tag)


class P2POp:  # torch.distributed.P2POp
    def __init__(self, op, tensor, peer=None, group=None, tag=0):
        self.own_start = functools.partial(op, tensor, peer, group, tag)


def batch_isend_irecv(p2p_op_list):
    return [each.own_start() for each in p2p_op_list]
