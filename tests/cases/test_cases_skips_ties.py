"""Cases 21 and 22 of what users were hurt by: skips and tied parameters."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe import GPipe, clip_grad_norm_, pop, skippable, stash
from tests.members import over_all_ways, train_once


def output_sum(output: Tensor, _: object) -> Tensor:
    return output.sum()


def step_sum(model: GPipe, face: str, x: Tensor) -> Tensor:
    """One mini-batch whose loss is the sum of the outputs."""
    if face == "step":
        return model.step(x, x, output_sum, loss_reduction="sum").loss
    return train_once(model, face, x, x, output_sum)


kept: list[StorageWeakRef] = []
num_alive: list[int] = []


@skippable(stash=["jump"])
class StashTwice(nn.Module):
    """Sends 2x ahead, and passes 3x on."""

    def forward(self, x: Tensor) -> Iterator[object]:
        double = 2 * x
        kept.append(StorageWeakRef(double.untyped_storage()))
        num_alive.append(sum(not storage.expired() for storage in kept))
        yield stash("jump", double)
        return 3 * x


@skippable(pop=["jump"])
class PopAndMultiply(nn.Module):
    """Multiplies what comes the short way by what comes the long one."""

    def forward(self, x: Tensor) -> Iterator[object]:
        jumped = yield pop("jump")
        return x * jumped


def skipping(schedule: str, checkpoint: str, chunks: int) -> GPipe:
    """Layers that compute w·3·(v·x) · 2·(v·x), with v and w in stages 0 and 1."""
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.constant_(first.weight, 2.0)
    nn.init.constant_(second.weight, 5.0)
    module = nn.Sequential(first, StashTwice(), second, PopAndMultiply())
    return GPipe(module, [2, 1, 1], chunks, schedule=schedule, checkpoint=checkpoint)


# Case 21. Pipelines whose stages know only their neighbours carry a skip through every stage
# between, or not at all. With v = 2, w = 5, the loss is 6·w·v²·Σx² = 120·Σx², its gradients are
# 12·w·v·Σx² = 120·Σx² and 6·v²·Σx² = 24·Σx².
@pytest.mark.parametrize("chunks", [1, 2, 4])
@over_all_ways
def test_case_21_a_skip_jumps_over_a_stage(face, schedule, checkpoint, chunks):
    model = skipping(schedule, checkpoint, chunks)
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]], requires_grad=True)
    assert step_sum(model, face, x) == 120 * 30
    assert [parameter.grad.item() for parameter in model.parameters()] == [120 * 30, 24 * 30]
    assert torch.equal(x.grad, 240 * x)

    model.eval()
    assert torch.equal(model(x), 120 * x.detach() ** 2)


# Case 21. What was stashed lived on, one tensor for each micro-batch, as long as the model. (What
# stage 2 holds may outlast the message that it is done by one micro-batch, hence K + 1.)
@over_all_ways
def test_case_21_skips_are_freed_after_use(face, schedule, checkpoint):
    kept.clear()
    num_alive.clear()
    model = skipping(schedule, checkpoint, chunks=8)
    step_sum(model, face, torch.ones(8, 1))
    assert len(kept) >= 8
    assert all(storage.expired() for storage in kept)
    if face == "step" and schedule == "1f1b":
        assert max(num_alive) <= 4


def tied() -> nn.Sequential:
    module = nn.Sequential(nn.Embedding(2, 1), nn.Identity(), nn.Linear(1, 2, bias=False))
    module[0].weight = nn.Parameter(torch.tensor([[1.0], [2.0]]))
    module[2].weight = module[0].weight
    return module


IDS = torch.tensor([[0], [1]])


# Case 22. Each stage had a copy of the tied weight, or counted it for itself. The logits are [1, 2]
# and [2, 4], their sum is 9. Each use gives a gradient of 3 and 3 (Σ of the head's weights for a
# token, Σ of the embeddings for a logit): 6 and 6 together, of norm 6·√2, not 12.
@pytest.mark.parametrize("chunks", [1, 2])
@over_all_ways
def test_case_22_a_tied_parameter_is_one_parameter(face, schedule, checkpoint, chunks):
    model = GPipe(tied(), 3, chunks, schedule=schedule, checkpoint=checkpoint)
    assert step_sum(model, face, IDS) == 9
    assert len(list(model.parameters())) == 1
    assert model[0].weight.grad.tolist() == [[6.0], [6.0]]
    assert clip_grad_norm_(model, 100.0).item() == pytest.approx(8.485, abs=1e-3)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@over_all_ways
def test_case_22_both_uses_stay_equal(face, schedule, checkpoint, optimizer_class):
    plain = tied()
    model = GPipe(tied(), 3, chunks=2, schedule=schedule, checkpoint=checkpoint)
    optimizers = [optimizer_class(module.parameters(), lr=0.1) for module in (model, plain)]
    losses = []
    for _ in range(3):
        losses.append(step_sum(model, face, IDS).item())
        plain_loss = train_once(plain, "backward", IDS, IDS, output_sum)
        assert losses[-1] == pytest.approx(plain_loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert model[0].weight is model[2].weight
    assert torch.equal(model.state_dict()["0.weight"], model.state_dict()["2.weight"])
    torch.testing.assert_close(model[0].weight, plain[0].weight)
    assert all(later < earlier for earlier, later in pairwise(losses))
