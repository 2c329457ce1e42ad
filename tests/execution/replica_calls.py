"""What ranks do in `test_replicas`, each part in a function; results go back to the test."""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from gpipe.execution import sums
from gpipe.execution.replicas import Replicas

NUM_RANKS = 4
WAYS = ("backend", "ring")
COUNTS = (2, 3, 4)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
SHAPES = ((5, 7), (3,), (), (2, 3, 4, 4), (0,), (40,), (1,))
SMALL_BYTES = 64  # several buckets even for these shapes

PRESENT = ((), (0,), (3,), (1, 2), (0, 1, 2, 3))  # by parameter: the ranks with a gradient

Groups = dict[int, Any]
Pairs = list[tuple[Parameter, Tensor | None]]


def everything(rank: int) -> dict[str, Any]:
    """Every part in turn, in one set of processes: starting them is what takes long."""
    groups: Groups = {number: dist.new_group(range(number)) for number in COUNTS[:-1]}
    groups[NUM_RANKS] = None
    parts = (
        summed, rounded, absent, laid_out, mixed, shared, counted, started_early, let_go,
        in_succession, on_another_thread, in_a_scattered_group, in_an_order, sparse_on_one,
        of_another_dtype, failed, distributed_parameters, outside,
    )  # fmt: skip
    return {part.__name__: part(rank, groups) for part in parts}


def values(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers: sums of them are exact in every dtype."""
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    return (((numbers * (rank + 2)) % 7) + rank + 1).to(dtype)


def total(shape: Sequence[int], ranks: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    each = [values(rank, shape, dtype) for rank in ranks]
    return torch.stack(each).sum(0, dtype=dtype) if each else torch.zeros(shape, dtype=dtype)


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    return [Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]


def reduced(
    replicas: Replicas, adds: Sequence[tuple[Sequence[Parameter], Sequence[Tensor | None]]]
) -> list[Tensor | None]:
    """The sums of a mini-batch, in which each of `adds` is a stage."""
    reduction = replicas.begin()
    for each, gradients in adds:
        reduction.add(each, list(gradients))
    pairs = reduction.finish()
    expected = [parameter for each, _ in adds for parameter in each]
    assert [id(parameter) for parameter, _ in pairs] == [id(each) for each in expected]
    return [gradient for _, gradient in pairs]


def one_stage(replicas: Replicas, gradients: Sequence[Tensor]) -> list[Tensor | None]:
    return reduced(replicas, [([Parameter(torch.zeros_like(g)) for g in gradients], gradients)])


@contextmanager
def opened(group: Any = None, way: str = "backend", **options: Any) -> Iterator[Replicas]:
    replicas = Replicas(group, all_reduce=way, **options)
    try:
        yield replicas
    finally:
        replicas.close()


def by_way(part: Callable[[str], Any]) -> dict[str, Any]:
    return {way: part(way) for way in WAYS}


def summed(rank: int, groups: Groups) -> dict:
    """By way, number of ranks and dtype."""
    found = {}
    for way in WAYS:
        for count in COUNTS:
            if rank >= count:
                continue
            with opened(groups[count], way, bucket_bytes=SMALL_BYTES) as replicas:
                for dtype in DTYPES:
                    mine = [values(rank, shape, dtype) for shape in SHAPES]
                    adds = [(parameters(dtype), mine), (parameters(dtype)[:2], mine[:2])]
                    found[way, count, dtype] = reduced(replicas, adds)
    return found


def rounded(rank: int, _: Groups) -> dict:
    """By way and dtype: random numbers, their sum, and the same once more."""
    found = {}
    for way in WAYS:
        with opened(None, way, bucket_bytes=SMALL_BYTES) as replicas:
            for dtype in (torch.bfloat16, torch.float32):
                generator = torch.Generator().manual_seed(rank)
                drawn = [torch.randn(size, generator=generator) for size in (1000, 5, 6, 33)]
                mine = [each.to(dtype) for each in drawn]
                runs = [torch.cat(one_stage(replicas, mine)) for _ in range(2)]
                found[way, dtype] = torch.cat(mine), *runs
    return found


def absent(rank: int, _: Groups) -> dict:
    """Parameter i has a gradient on the ranks of PRESENT[i]."""

    def part(way: str) -> list[Tensor | None]:
        shape = (2, 3)
        mine = [values(rank, shape) if rank in ranks else None for ranks in PRESENT]
        all_of_them = [Parameter(torch.zeros(shape)) for _ in PRESENT]
        with opened(None, way) as replicas:
            return reduced(replicas, [(all_of_them[:2], mine[:2]), (all_of_them[2:], mine[2:])])

    return by_way(part)


SHAPE = (2, 3, 4, 5)
LAST = torch.channels_last
LAYOUTS: dict[str, Callable[[int], Tensor | None]] = {
    "channels last": lambda rank: values(rank, SHAPE).to(memory_format=LAST),
    "channels last on one": lambda rank: (
        values(rank, SHAPE).to(memory_format=LAST) if rank == 1 else values(rank, SHAPE)
    ),
    "none on one": lambda rank: None if rank == 0 else values(rank, SHAPE),
    "transposed": lambda rank: values(rank, SHAPE).transpose(1, 2).contiguous().transpose(1, 2),
    "every other": lambda rank: values(rank, SHAPE).repeat_interleave(2, 3)[..., ::2],
    "expanded": lambda rank: torch.tensor(rank + 1.0).expand(SHAPE),
}


def laid_out(rank: int, _: Groups) -> dict:
    """By way and whether a bucket has several: the sums, by layout; parameters: channels last."""
    found = {}
    for way in WAYS:
        for bucket_bytes in (1, 2**20):
            with opened(None, way, bucket_bytes=bucket_bytes) as replicas:
                mine = [layout(rank) for layout in LAYOUTS.values()]
                all_of_them = [Parameter(torch.zeros(SHAPE).to(memory_format=LAST)) for _ in mine]
                found[way, bucket_bytes] = [
                    (each, each.stride(), each._is_view(), each.untyped_storage().nbytes())
                    for each in reduced(replicas, [(all_of_them, mine)])
                ]
    return found


def mixed(rank: int, _: Groups) -> dict:
    """Dtypes in turn; one gradient is in another dtype than its parameter, as that one asks for."""

    def part(way: str) -> list[Tensor | None]:
        dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16]
        all_of_them = [Parameter(torch.zeros(6, dtype=dtype)) for dtype in dtypes]
        all_of_them[4].grad_dtype = torch.float32
        mine: list = [values(rank, (6,), dtype) + 0.5 for dtype in dtypes]
        mine[4] = None if rank == 1 else mine[4].float() + 2**-10
        with opened(None, way) as replicas:
            return reduced(replicas, [(all_of_them, mine)])

    return by_way(part)


def shared(rank: int, _: Groups) -> list[Tensor | None]:
    """A parameter of two stages, with a gradient from each."""
    tied, other = Parameter(torch.zeros(3)), Parameter(torch.zeros(2))
    adds = [
        ([tied], [values(rank, (3,))]),
        ([other, tied], [values(rank, (2,)), 10 * values(rank, (3,))]),
    ]
    with opened() as replicas:
        return reduced(replicas, adds)


@contextmanager
def counting() -> Iterator[list[tuple[torch.dtype, int]]]:
    """What is summed, in order."""
    start, seen = dist.all_reduce, []

    def start_and_count(tensor: Tensor, **options: Any) -> Any:
        assert options["async_op"]
        seen.append((tensor.dtype, tensor.numel()))
        return start(tensor, **options)

    with patch.object(dist, "all_reduce", start_and_count):
        yield seen


def counted(rank: int, _: Groups) -> list[tuple[torch.dtype, int]]:
    """100 bytes a bucket, two stages."""
    sizes = (10, 15, 10, 26, 3), (4,)
    dtypes = {3: torch.float64}
    with counting() as seen, opened(bucket_bytes=100) as replicas:
        adds = []
        for stage in sizes:
            mine = [values(rank, (size,), dtypes.get(size, torch.float32)) for size in stage]
            adds.append(([Parameter(torch.zeros_like(each)) for each in mine], mine))
        reduced(replicas, adds)
    return seen


class Watched:
    """Remembers the last sum."""

    def __init__(self, inner: sums.Sums) -> None:
        self._inner = inner

    def start(self, tensor: Tensor) -> sums.Sum:
        self.last = self._inner.start(tensor)
        return self.last

    def close(self) -> None:
        self._inner.close()


def started_early(rank: int, _: Groups) -> dict:
    """The first stage's sum is over before the second stage is added."""

    def part(way: str) -> list[Tensor | None]:
        first, second = Parameter(torch.zeros(4)), Parameter(torch.zeros(4))
        with opened(None, way) as replicas:
            assert replicas._sums is not None
            watched = replicas._sums = Watched(replicas._sums)
            reduction = replicas.begin()
            reduction.add([first], [values(rank, (4,))])
            watched.last.wait()  # would never end, if the sum did not start before the next `add`
            reduction.add([second], [values(rank, (4,))])
            return [gradient for _, gradient in reduction.finish()]

    return by_way(part)


def let_go(rank: int, _: Groups) -> dict:
    """Whether the list is empty, who lives after `add`, and what a stranger still sees."""

    def part(way: str) -> tuple[bool, list[bool], Tensor]:
        mine = [values(rank, (8,)) for _ in range(4)]
        stranger = mine[2]
        seen = [weakref.ref(each) for each in mine]
        with opened(None, way, bucket_bytes=64) as replicas:
            reduction = replicas.begin()
            reduction.add([Parameter(torch.zeros(8)) for _ in mine], mine)
            alive = [each() is not None for each in seen]
            reduction.finish()
        return mine == [], alive, stranger

    return by_way(part)


def in_succession(rank: int, _: Groups) -> dict:
    """Three mini-batches, a close, and another one; how many threads there were."""

    def part(way: str) -> tuple[list[Tensor], list[int]]:
        found, threads = [], [len(rings())]
        replicas = Replicas(None, all_reduce=way)
        for factor in (1, 2, 3):
            found += one_stage(replicas, [factor * values(rank, (5,))])
            threads.append(len(rings()))
        assert replicas.begin().finish() == []
        replicas.close()
        threads.append(len(rings()))
        found += one_stage(replicas, [4 * values(rank, (5,))])
        left = rings()
        del replicas  # without a close: the threads end by themselves
        for thread in left:
            thread.join()
        return found, threads

    return by_way(part)


def rings() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gpipe-ring"]


def on_another_thread(rank: int, _: Groups) -> dict:
    """A worker adds, the caller finishes."""

    def part(way: str) -> list[Tensor | None]:
        with opened(None, way) as replicas:
            reduction = replicas.begin()
            arguments = [Parameter(torch.zeros(5))], [values(rank, (5,))]
            worker = threading.Thread(target=reduction.add, args=arguments)
            worker.start()
            worker.join()
            return [gradient for _, gradient in reduction.finish()]

    return by_way(part)


def in_a_scattered_group(rank: int, _: Groups) -> dict | None:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    return by_way(lambda way: one_stage(Replicas(group, all_reduce=way), [values(rank, (5,))]))


def in_an_order(_: int, __: Groups) -> list[Any]:
    """The orders that the ring is asked for."""
    seen = []

    def note(tensor: Tensor, group: Any, *, order: Any) -> None:
        seen.append(order)

    order = [2, 0, 3, 1]
    with (
        patch.object(sums, "ring_all_reduce", note),
        opened(None, "ring", ring_order=order) as all_,
    ):
        one_stage(all_, [torch.ones(3)])
    return seen


def error_of(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except (ValueError, ConnectionError) as error:
        return error
    return None


def sparse_on_one(rank: int, _: Groups) -> tuple[Exception | None, list]:
    """The error, and what was summed: nothing on the rank with the error."""
    mine = values(rank, (3, 2))
    if rank != 2:
        return None, []
    with counting() as seen, opened() as replicas:
        both = [Parameter(torch.zeros(2)), Parameter(torch.zeros(3, 2))]
        gradients = [torch.ones(2), mine.to_sparse()]
        return error_of(lambda: replicas.begin().add(both, gradients)), seen


def of_another_dtype(_: int, __: Groups) -> tuple[Exception | None, list]:
    with counting() as seen, opened() as replicas:
        parameter = Parameter(torch.zeros(2, dtype=torch.bfloat16))
        return error_of(lambda: replicas.begin().add([parameter], [torch.ones(2)])), seen


class Lost:
    """A work that fails."""

    def wait(self) -> None:
        raise ConnectionError("a peer is gone")


def failed(_: int, __: Groups) -> dict:
    """By way: the errors of a mini-batch of which a sum fails, and for the ring of the next."""
    calls = []

    def fail_second(tensor: Tensor, *_: Any, **__: Any) -> None:
        calls.append(tensor)
        if len(calls) == 2:
            raise ConnectionError("a peer is gone")

    mine = [torch.ones(3), torch.ones(3)]
    lost = patch.object(dist, "all_reduce", lambda *_, **__: Lost())
    with lost, opened(bucket_bytes=1) as replicas:
        found = {"backend": [error_of(lambda: one_stage(replicas, mine))]}
    failing = patch.object(sums, "ring_all_reduce", fail_second)
    with failing, opened(None, "ring", bucket_bytes=1) as replicas:
        found["ring"] = [error_of(lambda: one_stage(replicas, mine)) for _ in range(2)]
    assert len(calls) == 2
    return found


def distributed_parameters(rank: int, _: Groups) -> dict:
    """Two replicas of a stage that two ranks share; everything is gathered at the end."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    tensor, data = mesh["tensor"], mesh.get_group("data")
    replica = mesh.get_local_rank("data")
    placed = {
        "even": ((4, 3), Shard(0)), "uneven": ((5, 3), Shard(0)), "columns": ((3, 4), Shard(1)),
        "partial": ((3, 3), Replicate()), "none here": ((5, 3), Shard(0)),
        "nowhere": ((5, 3), Shard(0)), "plain": ((3,), None),
    }  # fmt: skip

    def part(way: str) -> dict[str, Any]:
        all_of_them, mine = [], []
        for name, (shape, placement) in placed.items():
            parameter, gradient = torch.zeros(shape), values(replica, shape)
            if placement is not None:
                parameter = distribute_tensor(parameter, tensor, [placement])
                gradient = (
                    DTensor.from_local(gradient, tensor, [Partial()], run_check=False)
                    if name == "partial"
                    else distribute_tensor(gradient, tensor, [placement])
                )
            is_none = name == "nowhere" or (name == "none here" and replica == 0)
            all_of_them.append(Parameter(parameter))
            mine.append(None if is_none else gradient)
        with opened(data, way) as replicas:
            found = reduced(replicas, [(all_of_them, mine)])
        return dict(zip(placed, map(described, found), strict=True))

    return by_way(part)


def described(gradient: Tensor | None) -> Any:
    if not isinstance(gradient, DTensor):
        return gradient
    return gradient.full_tensor(), gradient.placements, tuple(gradient.shape), gradient.stride()


def outside(rank: int, _: Groups) -> Exception | None:
    group = dist.new_group([0, 1])
    # The last part: a rank that ended now could leave another one in the middle of connecting.
    dist.barrier()
    return error_of(lambda: Replicas(group))
