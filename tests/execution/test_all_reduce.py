"""The ring sums as `torch.distributed.all_reduce` does, with neighbours alone, in processes."""

import pytest
import torch

from gpipe.execution import ring_all_reduce
from gpipe.plan import ring_bytes
from tests.distributed.launch import run
from tests.execution import ring_calls
from tests.execution.ring_calls import NUM_RANKS, Case

distributed = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks():
    """What each part of `ring_calls` has returned, by rank."""
    return run(ring_calls.everything, NUM_RANKS)


def require_equal(found, expected):
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@distributed
@pytest.mark.parametrize(
    ("part", "cases"),
    [
        ("summed", [*ring_calls.KINDS, *ring_calls.SIZES]),
        ("in_pieces", ring_calls.PIECES),
        ("in_pieces_that_block", ring_calls.PIECES),
    ],
)
def test_every_rank_gets_the_sum(ranks, part, cases):
    for case in cases:
        for rank in range(case.num_ranks):
            require_equal(ranks[rank][part][case], case.expected())


@distributed
@pytest.mark.parametrize("case", ring_calls.COUNTED, ids=lambda case: f"N={case.num_ranks}")
def test_each_rank_sends_to_the_right_and_receives_from_the_left_what_a_ring_needs(ranks, case):
    count, num_bytes = case.num_ranks, case.expected().nbytes
    for rank in range(count):
        sent, received = ranks[rank]["counted"][case]
        if count == 1:
            assert sent == received == {}
        else:
            assert sent == {(rank + 1) % count: ring_bytes(count, num_bytes)}
            assert received == {(rank - 1) % count: ring_bytes(count, num_bytes)}


@distributed
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_all_ranks_have_the_same_bits(ranks, dtype):
    mine, totals = zip(*(rank["rounded"][dtype] for rank in ranks), strict=True)
    for total in totals:
        require_equal(total, totals[0])
    exact = torch.stack(mine).double().sum(0)
    # A sum of five is rounded four times, to at most half of the last place of at most 32.
    assert (totals[0].double() - exact).abs().max() <= 4 * 16 * torch.finfo(dtype).eps


@distributed
@pytest.mark.parametrize("name", ["transposed", "every other", "of one rank"])
def test_strides_do_not_matter_and_nothing_beside_a_view_changes(ranks, name):
    expected = Case(NUM_RANKS, (4, 3)).expected()
    for rank in ranks:
        total, base = rank["laid_out"][name]
        require_equal(total, expected)
        assert base is None or base.sum() == expected.sum()


@distributed
def test_views_that_are_conjugate_or_negative_hold_the_sum(ranks):
    expected = Case(NUM_RANKS, (4, 3)).expected()
    for rank in ranks:
        require_equal(rank["laid_out"]["conjugate"][0], expected.to(torch.complex64))
        require_equal(rank["laid_out"]["negative"][0], expected)


@distributed
@pytest.mark.parametrize("name", ring_calls.ORDERS)
def test_an_order_makes_the_ring(ranks, name):
    order = list(ring_calls.ORDERS[name])
    for place, rank in enumerate(order):
        total, (sent, received) = ranks[rank]["in_an_order"][name]
        require_equal(total, Case(4, (8,)).expected())
        assert list(sent) == [order[(place + 1) % 4]]
        assert list(received) == [order[place - 1]]


@distributed
def test_a_group_need_not_begin_with_rank_0(ranks):
    for rank in ring_calls.SCATTERED:
        expected = Case(NUM_RANKS, (7,)).expected(ring_calls.SCATTERED)
        require_equal(ranks[rank]["in_a_scattered_group"], expected)


@distributed
def test_other_messages_between_the_ranks_stay_others(ranks):
    for rank in range(NUM_RANKS):
        received, total = ranks[rank]["amid_other_messages"]
        assert received == (rank - 1) % NUM_RANKS
        require_equal(total, Case(NUM_RANKS, (7,)).expected())


@distributed
def test_a_parameter_is_changed_without_a_graph_and_autograd_knows_that_it_has_changed(ranks):
    for rank in ranks:
        total, has_graph, num_changes = rank["seen_by_autograd"]
        require_equal(total, Case(NUM_RANKS, (7,)).expected())
        assert not has_graph
        assert num_changes > 0


@distributed
@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("short", ValueError, "`order` is [0, 1], in a group of 5. Pass every rank of the group"),
        ("double", ValueError, "`order` is [0, 1, 2, 3, 3], in a group of 5. Pass every rank"),
        ("number", TypeError, "`order` is 3, of type int. Pass a list of ranks."),
        ("outside", ValueError, "Rank 3 is not in `group`. Call this only on the ranks of"),
    ],
)
def test_wrong_groups_and_orders_are_refused(ranks, name, kind, message):
    error = ranks[3]["refused"][name]
    assert type(error) is kind
    assert str(error).startswith(message)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: ring_all_reduce([1.0]), TypeError, r"`tensor` is \[1\.0\], of type list\. Pass"),
        (
            lambda: ring_all_reduce(torch.eye(3).to_sparse()),
            ValueError,
            r"`tensor` is not dense, its layout is torch\.sparse_coo\. Pass tensor\.to_dense",
        ),
        (
            lambda: ring_all_reduce(torch.ones(3).expand(2, 3)),
            ValueError,
            r"has strides \(0, 1\): several of its elements are one in memory\. Pass",
        ),
        (
            lambda: ring_all_reduce(torch.ones(3), 7),
            TypeError,
            r"`group` is 7, of type int\. Pass what torch\.distributed\.new_group has returned",
        ),
        (
            lambda: ring_all_reduce(torch.ones(3)),
            ValueError,
            r"There is no process group\. Call torch\.distributed\.init_process_group first",
        ),
    ],
    ids=["no tensor", "sparse", "expanded", "no group", "no process group"],
)
def test_wrong_arguments_are_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
