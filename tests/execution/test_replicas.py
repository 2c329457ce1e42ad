"""Replicas get the sums of their gradients, in real processes."""

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.nn import Parameter

from gpipe.execution.buckets import unite
from gpipe.execution.replicas import Replicas
from tests.distributed.launch import run
from tests.execution import replica_calls
from tests.execution.replica_calls import COUNTS, DTYPES, LAYOUTS, NUM_RANKS, WAYS, total

distributed = pytest.mark.distributed
each_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(scope="module")
def ranks():
    """What each part of `replica_calls` has returned, by rank."""
    return run(replica_calls.everything, NUM_RANKS)


def require_equal(found, expected):
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@distributed
@each_way
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_replica_gets_the_sums(ranks, way, count, dtype):
    for rank in ranks[:count]:
        sums = rank["summed"][way, count, dtype]
        for found, shape in zip(
            sums, [*replica_calls.SHAPES, *replica_calls.SHAPES[:2]], strict=True
        ):
            require_equal(found, total(shape, range(count), dtype))


@distributed
@each_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_all_replicas_have_the_same_bits_in_every_run(ranks, way, dtype):
    mine, first, second = zip(*(rank["rounded"][way, dtype] for rank in ranks), strict=True)
    for found in (*first, *second):
        require_equal(found, first[0])
    exact = torch.stack(mine).double().sum(0)
    # A sum of four is rounded three times, to at most half of the last place of at most 16.
    assert (first[0].double() - exact).abs().max() <= 3 * 8 * torch.finfo(dtype).eps


@distributed
@each_way
def test_a_gradient_is_none_only_where_no_replica_has_one(ranks, way):
    for rank in ranks:
        for found, present in zip(rank["absent"][way], replica_calls.PRESENT, strict=True):
            if present:
                require_equal(found, total((2, 3), present))
            else:
                assert found is None


@distributed
@each_way
@pytest.mark.parametrize("bucket_bytes", [1, 2**20], ids=["a bucket each", "one bucket"])
def test_strides_are_those_of_the_local_gradient_and_memory_is_its_own(ranks, way, bucket_bytes):
    everyone, shape = range(NUM_RANKS), replica_calls.SHAPE
    for number, rank in enumerate(ranks):
        found = rank["laid_out"][way, bucket_bytes]
        for name, (summed, stride, is_view, num_bytes) in zip(LAYOUTS, found, strict=True):
            if name == "expanded":
                expected = torch.full(shape, 10.0)
            else:
                expected = total(shape, [1, 2, 3] if name == "none on one" else everyone)
            require_equal(summed, expected)
            local = LAYOUTS[name](number)
            if local is None:  # as the parameter is
                local = expected.to(memory_format=torch.channels_last)
            assert stride == torch.empty_like(local).stride(), name
            assert not is_view
            assert num_bytes == expected.nbytes


@distributed
@each_way
def test_dtypes_go_apart_and_a_wider_gradient_is_summed_in_its_own(ranks, way):
    everyone = range(NUM_RANKS)
    for rank in ranks:
        *same, wide = rank["mixed"][way]
        for found in same:
            require_equal(found, (total((6,), everyone) + 0.5 * NUM_RANKS).to(found.dtype))
        require_equal(wide, total((6,), [0, 2, 3]) + 3 * (0.5 + 2**-10))
        assert [found.dtype for found in same] == [
            torch.float32, torch.bfloat16, torch.float64, torch.float32,
        ]  # fmt: skip


@distributed
def test_a_parameter_that_is_added_twice_has_two_sums(ranks):
    expected = total((3,), range(NUM_RANKS))
    for rank in ranks:
        first, other, second = rank["shared"]
        require_equal(first, expected)
        require_equal(other, total((2,), range(NUM_RANKS)))
        require_equal(second, 10 * expected)


@distributed
def test_buckets_hold_what_fits_and_presence_is_told_once(ranks):
    # Of 100 bytes: 10 and 15 fit; 26 do not fit into any; the 10 and the second stage go on their
    # own, since a stage does not wait for the next; the 3 are of another dtype.
    single, double = torch.float32, torch.float64
    expected = [
        (single, 25), (single, 26), (single, 10), (double, 3), (single, 4), (torch.int32, 6),
    ]  # fmt: skip
    for rank in ranks:
        assert sorted(rank["counted"][:4], key=str) == sorted(expected[:4], key=str)
        assert rank["counted"][4:] == expected[4:]
        assert rank["counted"] == ranks[0]["counted"]


@distributed
@each_way
def test_a_stage_is_summed_before_the_next_one_is_added(ranks, way):
    for rank in ranks:
        for found in rank["started_early"][way]:
            require_equal(found, total((4,), range(NUM_RANKS)))


@distributed
@each_way
def test_gradients_are_let_go_when_they_are_packed_and_never_written(ranks, way):
    for number, rank in enumerate(ranks):
        is_emptied, alive, stranger = rank["let_go"][way]
        assert is_emptied
        assert alive == [False, False, True, False]
        require_equal(stranger, replica_calls.values(number, (8,)))


@distributed
@each_way
def test_mini_batches_follow_each_other_and_a_closed_ring_starts_again(ranks, way):
    for rank in ranks:
        found, threads = rank["in_succession"][way]
        for factor, each in enumerate(found, 1):
            require_equal(each, factor * total((5,), range(NUM_RANKS)))
        assert threads == ([0, 1, 1, 1, 0] if way == "ring" else [0, 0, 0, 0, 0])


@distributed
@each_way
def test_who_finishes_need_not_be_who_has_added(ranks, way):
    for rank in ranks:
        require_equal(rank["on_another_thread"][way][0], total((5,), range(NUM_RANKS)))


@distributed
@each_way
def test_a_group_need_not_begin_with_rank_0(ranks, way):
    for rank in (1, 3):
        require_equal(ranks[rank]["in_a_scattered_group"][way][0], total((5,), [1, 3]))


@distributed
def test_the_ring_has_the_order_that_was_asked_for(ranks):
    for rank in ranks:
        assert rank["in_an_order"] == [[2, 0, 3, 1]] * 2  # gradients and presence


@distributed
def test_a_sparse_gradient_is_refused_before_anything_starts(ranks):
    error, seen = ranks[2]["sparse_on_one"]
    assert type(error) is ValueError
    assert str(error).startswith(
        "The gradient of parameter 1 of a stage, of shape (3, 2), is not dense, its layout is "
        "torch.sparse_coo, and replicas sum dense gradients. Make it dense, such as with"
    )
    assert seen == []


@distributed
def test_a_gradient_that_the_sum_would_round_is_refused(ranks):
    for rank in ranks:
        error, seen = rank["of_another_dtype"]
        assert type(error) is ValueError
        assert str(error).startswith(
            "The gradient of parameter 0 of a stage, of shape (2,), is of torch.float32, and "
            "replicas would sum it in torch.bfloat16. Set the parameter's `grad_dtype`"
        )
        assert seen == []


@distributed
@each_way
def test_the_error_of_a_sum_comes_out_and_a_ring_out_of_step_is_not_used_again(ranks, way):
    for rank in ranks:
        for error in rank["failed"][way]:
            assert type(error) is ConnectionError
            assert str(error) == "a peer is gone"


@distributed
@each_way
def test_parts_of_distributed_parameters_are_summed(ranks, way):
    shapes = {
        "even": (4, 3), "uneven": (5, 3), "columns": (3, 4), "partial": (3, 3), "none here": (5, 3),
    }  # fmt: skip
    placements = {"columns": Shard(1), "partial": Replicate()}
    for rank in ranks:
        found = rank["distributed_parameters"][way]
        for name, shape in shapes.items():
            whole, placed, global_shape, stride = found[name]
            expected = total(shape, [1] if name == "none here" else [0, 1])
            # Both ranks of a replica have the whole gradient, to be added up.
            require_equal(whole, 2 * expected if name == "partial" else expected)
            assert placed == (placements.get(name, Shard(0)),)
            assert global_shape == shape
            assert stride == expected.stride()
        assert found["nowhere"] is None
        require_equal(found["plain"], total((3,), [0, 1]))


@distributed
def test_ranks_outside_of_the_group_are_refused(ranks):
    assert [rank["outside"] for rank in ranks[:2]] == [None, None]
    for number in (2, 3):
        error = ranks[number]["outside"]
        assert type(error) is ValueError
        assert str(error).startswith(f"Rank {number} is not in `group`. Make Replicas only on")


def require_untouched(replicas):
    first, second = Parameter(torch.zeros(3)), Parameter(torch.zeros(2, 2))
    gradient = torch.ones(1).expand(3)
    reduction = replicas.begin()
    mine = [gradient, None]
    reduction.add([first, second], mine)
    assert mine == []
    (one, found), (other, none) = reduction.finish()
    assert one is first
    assert other is second
    assert found is gradient
    assert none is None
    replicas.close()


def test_without_a_sum_gradients_come_back_as_they_are():
    require_untouched(Replicas(None, all_reduce="none"))


@pytest.mark.parametrize("way", WAYS)
def test_one_replica_copies_and_sends_nothing(monkeypatch, way):
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    require_untouched(Replicas(None, all_reduce=way))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"all_reduce": "rings"}, ValueError, r"`all_reduce` is 'rings'\. Use one of 'backend', "),
        ({"all_reduce": 3}, TypeError, r"`all_reduce` is 3, of type int\. Use one of"),
        ({"bucket_bytes": 0}, ValueError, r"`bucket_bytes` is 0\. Pass a whole number of at least"),
        ({"bucket_bytes": 2.5}, TypeError, r"`bucket_bytes` is 2\.5, of type float\. Pass"),
    ],
)
def test_wrong_arguments_are_refused(options, kind, message):
    with pytest.raises(kind, match=message):
        Replicas(None, **options)


@pytest.mark.parametrize(
    ("sizes", "bucket_bytes", "buckets"),
    [
        ([], 8, []),
        ([1, 1, 1], 8, [[0, 1], [2]]),
        ([1, 3, 1], 8, [[1], [0, 2]]),
        ([2, 1, 2], 8, [[0], [1], [2]]),
        ([0, 0], 8, [[0, 1]]),
        ([5, 5], 1, [[0], [1]]),
    ],
)
def test_parameters_are_united_in_order_while_they_fit(sizes, bucket_bytes, buckets):
    assert unite([Parameter(torch.zeros(size)) for size in sizes], bucket_bytes) == buckets
