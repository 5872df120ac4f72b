"""The stand-in for torch.distributed."""

import contextlib
import enum
import fcntl
import functools
import inspect
import os
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote


class Store:  # torch.distributed.Store, with a file for each key
    def own_path(self, key):
        return self.own_folder / quote(self.own_prefix + key, safe="")

    def add(self, key, amount):
        with Path(self.own_folder, "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            amount += int(self.get(key)) if self.check([key]) else 0
            self.set(key, str(amount))
        return amount

    def check(self, keys):
        return all(self.own_path(key).exists() for key in keys)

    def get(self, key):
        while not self.check([key]):
            time.sleep(1e-3)
        return self.own_path(key).read_bytes()

    def set(self, key, value):
        new = self.own_folder / f"new {os.getpid()}"
        new.write_bytes(value.encode() if isinstance(value, str) else value)
        new.replace(self.own_path(key))


class FileStore(Store):  # torch.distributed.FileStore
    def __init__(self, file_name, world_size=-1):
        self.own_folder, self.own_prefix = Path(f"{file_name}-keys"), ""
        self.own_folder.mkdir(exist_ok=True)


class PrefixStore(Store):  # torch.distributed.PrefixStore
    def __init__(self, prefix, store):
        self.own_folder = store.own_folder
        self.own_prefix = f"{store.own_prefix}{prefix}/"


class own_Bound(type):
    """As pybind11's classes, whose constructors a subclass must call."""

    def __call__(cls, *args, **options):
        made = super().__call__(*args, **options)
        if not hasattr(made, "own_made"):
            raise TypeError(f"{cls}.__init__() must be called when overriding __init__")
        return made


class Work(metaclass=own_Bound):  # torch.distributed.Work
    def __init__(self):
        self.own_made = True

    def wait(self, timeout=timedelta(0)):
        return True


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


own_SUM = ReduceOp(ReduceOp.SUM)


def own_options(**fields):
    """Return a class of options, which takes no others."""
    fields |= {"asyncOp": True, "timeout": timedelta(milliseconds=-1)}

    def init(self):
        for field, value in fields.items():
            setattr(self, field, value)

    return type("Options", (), {"__slots__": tuple(fields), "__init__": init})


AllreduceCoalescedOptions = own_options(reduceOp=own_SUM)
AllreduceOptions = own_options(reduceOp=own_SUM)
AllToAllOptions = own_options()
BarrierOptions = own_options()  # torch.distributed.BarrierOptions, and so on
BroadcastOptions = own_options(rootRank=0)
GatherOptions = own_options(rootRank=0)
ReduceOptions = own_options(reduceOp=own_SUM, rootRank=0)
ReduceScatterOptions = own_options(reduceOp=own_SUM)
ScatterOptions = own_options(rootRank=0)


class ProcessGroup(metaclass=own_Bound):  # torch.distributed.ProcessGroup
    def __init__(self, rank, size):
        self.own_place = rank, size
        self.own_made = True

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
        distributed_c10d._world.own_create = func


class group:  # torch.distributed.group
    WORLD = None


class distributed_c10d:  # torch.distributed.distributed_c10d
    AllgatherOptions = own_options()

    class _DistributedBackendOptions:
        __slots__ = "group_rank", "group_size", "store", "timeout"

    class _world:  # torch.distributed.distributed_c10d._world
        group_count, pg_coalesce_state, pg_group_ranks, pg_map = 0, {}, {}, {}


own_world = distributed_c10d._world
own_AllgatherOptions = distributed_c10d.AllgatherOptions


def init_process_group(backend, *, timeout, world_size, rank, store):
    ranks, store = range(world_size), PrefixStore("default_pg", store)
    group.WORLD = own_new_group(ranks, timeout, backend, None, rank, store)


def is_initialized():
    return group.WORLD is not None


own_LONG = timedelta(minutes=30)


def new_group(ranks=None, timeout=None, backend=None, pg_options=None):
    world, (_, store) = group.WORLD, own_world.pg_map[group.WORLD]
    ranks, timeout = sorted(ranks or range(world.size())), timeout or own_LONG
    return own_new_group(ranks, timeout, backend, pg_options, world.rank(), store)


def own_new_group(ranks, timeout, backend, options, me, store):
    name, own_world.group_count = own_world.group_count, own_world.group_count + 1
    if me not in ranks:
        return object()  # torch has a mark for it
    assert backend == "symm"
    given = distributed_c10d._DistributedBackendOptions()
    given.store = PrefixStore("cpu/", PrefixStore(f"{name}/", store))
    given.group_rank, given.group_size = ranks.index(me), len(ranks)
    given.timeout = timeout
    made = own_world.own_create(given, options)
    made._set_group_name(str(name))
    own_world.pg_map[made] = backend, given.store
    own_world.pg_group_ranks[made] = {rank: n for n, rank in enumerate(ranks)}
    return made


def destroy_process_group(group=None):
    for each in [group] if group else [*own_world.pg_map][::-1]:
        each.shutdown()
        del own_world.pg_map[each], own_world.pg_group_ranks[each]


def own_ended(work, async_op):
    if async_op:
        return work
    if work is not None:
        work.wait()
    return None


def own_function(prepare):
    """Make a function of torch of one that returns options, a method and tensors.

    Complex tensors stay complex, of which torch often makes pairs of numbers.
    """
    signature = inspect.signature(prepare)

    @functools.wraps(prepare)
    def call(*args, **named):
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        given = bound.arguments
        options, name, *tensors = prepare(**given)
        where, root = given["group"] or group.WORLD, given.get("src", given.get("dst"))
        options.asyncOp = given["async_op"]
        if "op" in given:
            options.reduceOp = ReduceOp(given["op"])
        if root is not None:
            options.rootRank = own_world.pg_group_ranks[where][root]
        calls = own_world.pg_coalesce_state.get(where)
        if calls is not None and f"{name}_coalesced" in own_together:
            calls.append((f"{name}_coalesced", options, tensors))
            return None  # for async_op, torch returns a work that refuses every use
        return own_ended(getattr(where, name)(*tensors, options), given["async_op"])

    return call


@own_function
def all_gather(tensor_list, tensor, group=None, async_op=False):
    return own_AllgatherOptions(), "allgather", [tensor_list], [tensor]


@own_function
def all_gather_single(output_tensor, input_tensor, group=None, async_op=False):
    return own_AllgatherOptions(), "all_gather_single", output_tensor, input_tensor


@own_function
def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False):
    return AllreduceOptions(), "allreduce", [tensor]


@own_function
def all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False):
    return AllToAllOptions(), "alltoall", output_tensor_list, input_tensor_list


@own_function
def all_to_all_single(
    output,
    input,
    output_split_sizes=None,
    input_split_sizes=None,
    group=None,
    async_op=False,
):
    parts = output_split_sizes or [], input_split_sizes or []
    return AllToAllOptions(), "all_to_all_single", output, input, *parts


@own_function
def broadcast(tensor, src=None, group=None, async_op=False):
    return BroadcastOptions(), "broadcast", [tensor]


@own_function
def gather(tensor, gather_list=None, dst=None, group=None, async_op=False):
    return GatherOptions(), "gather", [gather_list] if gather_list else [], [tensor]


@own_function
def reduce(tensor, dst=None, op=ReduceOp.SUM, group=None, async_op=False):
    return ReduceOptions(), "reduce", [tensor]


@own_function
def reduce_scatter(output, input_list, op=ReduceOp.SUM, group=None, async_op=False):
    return ReduceScatterOptions(), "reduce_scatter", [output], [input_list]


@own_function
def reduce_scatter_single(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    return ReduceScatterOptions(), "reduce_scatter_single", output, input


@own_function
def scatter(tensor, scatter_list=None, src=None, group=None, async_op=False):
    return ScatterOptions(), "scatter", [tensor], [scatter_list] if scatter_list else []


all_gather_into_tensor, reduce_scatter_tensor = all_gather_single, reduce_scatter_single
own_together = {
    "allreduce_coalesced": AllreduceCoalescedOptions,
    "all_gather_single_coalesced": own_AllgatherOptions,
    "reduce_scatter_single_coalesced": ReduceScatterOptions,
}


@contextlib.contextmanager
def _coalescing_manager(group=None, device=None, async_ops=False):
    calls = own_world.pg_coalesce_state.setdefault(group, [])
    if device:
        group._start_coalescing(device)
    block, work = Work(), None
    yield block  # after an exception, torch ends nothing
    del own_world.pg_coalesce_state[group]
    if calls:
        ((name, first, _), *_), tensors = calls, [each for _, _, each in calls]
        options = own_together[name]()
        options.asyncOp = async_ops
        if "reduce" in name:
            options.reduceOp = first.reduceOp
        lists = [[*each] for each in zip(*tensors, strict=True)]
        if name == "allreduce_coalesced":
            lists = [[tensor for (tensor,) in lists[0]]]
        work = getattr(group, name)(*lists, options)
    if device:
        work = group._end_coalescing(device)
    if work is not None:
        block.wait = work.wait
        own_ended(work, async_ops)


@own_function
def barrier(group=None, async_op=False, device_ids=None, timeout=None):
    options = BarrierOptions()
    options.timeout = timeout or options.timeout
    return options, "barrier"


def isend(tensor, dst=None, group=None, tag=0):
    return group.send([tensor], own_world.pg_group_ranks[group][dst], tag)


def irecv(tensor, src=None, group=None, tag=0):
    if src is None:
        return group.recv_anysource([tensor], tag)
    return group.recv([tensor], own_world.pg_group_ranks[group][src], tag)


def send(tensor, dst=None, group=None, tag=0):
    isend(tensor, dst, group, tag).wait()


def recv(tensor, src=None, group=None, tag=0):
    irecv(tensor, src, group, tag).wait()
    return src


class P2POp:  # torch.distributed.P2POp
    def __init__(self, op, tensor, peer=None, group=None, tag=0):
        self.own_start = functools.partial(op, tensor, peer, group, tag)


def batch_isend_irecv(p2p_op_list):
    return [each.own_start() for each in p2p_op_list]
