"""A deferred norm that is used twice, by several threads, or in vain."""

import copy
import itertools
import threading

import pytest
import torch
from torch import Tensor, nn

from gpipe.stage.batchnorm import (
    Collector,
    defer_batch_norm,
)
from tests.stage.norms import (
    FEATURES,
    assert_close,
    assert_unchanged,
    buffers,
    data,
    deferred,
    lively,
    observe,
    train,
)

# ---- several uses, several micro-batches, several threads ----


class Twice(nn.Module):
    """Uses its norm twice, on different values."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x), self.norm(x * 2 + 1)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_each_use_updates_in_order_of_use(momentum):
    # Norms before and after it: nothing but the norms and their uses counts.
    plain = Twice(lively(nn.BatchNorm1d(FEATURES, momentum=momentum)))
    ours = copy.deepcopy(plain)
    x = data((FEATURES,))
    plain(x)
    train(ours, x.split([5, 4, 3]))
    assert plain.norm.num_batches_tracked.item() == 2
    assert_close(ours, plain)


def test_uses_in_two_stages_count_in_order_of_use():
    plain = lively(nn.BatchNorm1d(FEATURES))
    ours = deferred(plain)
    collector = Collector([ours])
    x = data((FEATURES,))
    plain(x)
    plain(x * 7)
    observe(ours, x.split(4), collector)
    observe(ours, (x * 7).split(4), collector)
    collector.commit()
    assert_close(ours, plain)


def test_bits_do_not_depend_on_the_order_of_arrival():
    torch.manual_seed(4)
    pieces = (torch.randn(23, 50) * 7 + 3).split([6, 1, 5, 4, 7])
    seen = []
    for order in itertools.permutations(range(5)):
        ours = deferred(nn.BatchNorm1d(50))
        collector = Collector([ours])
        for microbatch in order:
            with collector.observing(microbatch):
                ours(pieces[microbatch])
        collector.commit()
        seen.append(buffers(ours))
    assert all(torch.equal(seen[0][name], other[name]) for other in seen for name in other)


def test_threads_observe_different_microbatches_at_once():
    plain = nn.Sequential(*(lively(nn.BatchNorm1d(FEATURES)) for _ in range(2)))
    ours = copy.deepcopy(plain)
    norms = defer_batch_norm([ours])
    collector = Collector(norms)
    x = data((FEATURES,))
    pieces = x.tensor_split(2)
    both_inside = threading.Barrier(2)

    def stage(index: int) -> None:
        for turn in range(2):
            microbatch = (index + turn) % 2
            with collector.observing(microbatch):
                both_inside.wait(timeout=10)
                norms[index](pieces[microbatch])
                both_inside.wait(timeout=10)

    threads = [threading.Thread(target=stage, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    collector.commit()
    for norm in plain:
        norm(x)
    assert_close(ours, plain)


def interrupted(norm: nn.Module) -> None:
    norm(data((FEATURES,)))
    raise KeyboardInterrupt


def test_without_a_commit_nothing_has_changed():
    ours = deferred(lively(nn.BatchNorm1d(FEATURES)))
    before = buffers(ours)
    versions = [buffer._version for buffer in ours.buffers()]
    collector = Collector([ours])
    observe(ours, data((FEATURES,)).split(4), collector)
    with pytest.raises(KeyboardInterrupt), collector.observing(4):
        interrupted(ours)
    assert_unchanged(ours, before)
    assert [buffer._version for buffer in ours.buffers()] == versions
    ours(data((FEATURES,)))  # and this thread observes no longer
    assert ours.num_batches_tracked.item() == 1


def test_a_second_commit_commits_nothing():
    ours = deferred(nn.BatchNorm1d(FEATURES).double())
    collector = Collector([ours])
    observe(ours, [data((FEATURES,))], collector)
    collector.commit()
    before = buffers(ours)
    collector.commit()
    assert_unchanged(ours, before)


def test_collectors_inside_each_other():
    inner, outer = (deferred(nn.BatchNorm1d(FEATURES)) for _ in range(2))
    collectors = Collector([inner]), Collector([outer])
    x = torch.randn(4, FEATURES)
    with collectors[1].observing(0):
        with collectors[0].observing(5):
            inner(x)
        outer(x)
    for collector in collectors:
        collector.commit()
    assert inner.num_batches_tracked.item() == outer.num_batches_tracked.item() == 1


def test_a_compiled_layer_is_deferred_too():
    # A tracer that froze "nothing observes" into its graph would leak each micro-batch.
    plain = lively(nn.BatchNorm1d(FEATURES))
    ours = deferred(plain)
    compiled = torch.compile(ours, backend="eager")
    x = data((FEATURES,))
    for _ in range(2):
        compiled(x)
        plain(x)
        collector = Collector([ours])
        observe(compiled, x.split(3), collector)
        with collector.replaying():
            compiled(x[:3])
        collector.commit()
        plain(x)
        assert_close(ours, plain)
