"""Cases 8 to 13 of what users were hurt by: checkpointing and randomness."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe, is_recomputing
from gpipe.errors import GpipeError
from tests.members import (
    CHECKPOINT_MODES,
    FACES,
    SCHEDULES,
    mlp,
    over_all_ways,
    take_gradients,
    train_once,
)


def output_sum(output: Tensor, _: object) -> Tensor:
    return output.sum()


def step_sum(model: GPipe, face: str, x: object, target: object) -> Tensor:
    """One mini-batch whose loss is the sum of the outputs."""
    if face == "step":
        return model.step(x, target, output_sum, loss_reduction="sum").loss
    return train_once(model, face, x, target, output_sum)


def assert_same_gradients(piped: dict[str, Tensor], plain: dict[str, Tensor], limit: float) -> None:
    assert piped.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(piped[name], gradient, rtol=limit, atol=limit)


class SeesDtype(nn.Linear):
    """Notes the precision in which it computes."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.seen: list[tuple[bool, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen.append((is_recomputing(), y.dtype))
        return torch.tanh(y)


# Case 8. Autocast is per thread: workers, and recomputes behind the end of the `with`, computed in
# float32, another forward than the one whose loss was shown.
@over_all_ways
def test_case_8_autocast_holds_in_workers_and_in_recompute(face, schedule, checkpoint):
    torch.manual_seed(0)
    module = nn.Sequential(SeesDtype(), SeesDtype(), SeesDtype())
    model = GPipe(module, 3, chunks=2, schedule=schedule, checkpoint=checkpoint)
    x, y = torch.randn(2, 8, 6)

    def train(trained: nn.Module, face: str) -> dict[str, Tensor]:
        if face == "step":
            with torch.autocast("cpu", torch.bfloat16):
                trained.step(x, y, nn.MSELoss())
        else:
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(trained(x).float(), y)
            loss.backward()
        return take_gradients(trained)

    piped = train(model, face)
    for layer in module:
        assert {dtype for _, dtype in layer.seen} == {torch.bfloat16}
        assert [again for again, _ in layer.seen].count(False) == 2
        assert checkpoint != "always" or [again for again, _ in layer.seen].count(True) == 2
    plain = train(module, "backward")
    assert_same_gradients(piped, plain, limit=4e-3)  # bfloat16 has 8 bits


class Noise(nn.Module):
    """Multiplies by noise from a source that torch's default generator knows nothing of."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * self.draw()


def own_generator() -> Callable[[], float]:
    generator = torch.Generator().manual_seed(0)
    return lambda: torch.rand((), generator=generator).item()


SOURCES = {"NumPy": np.random.rand, "random": random.random, "Generator": own_generator()}


# Case 9. The recompute drew another mask than the forward, and the gradients were silently wrong.
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("face", FACES)
def test_case_9_a_mask_that_cannot_be_replayed_is_an_error(face, schedule, source):
    module = nn.Sequential(*mlp(2), Noise(SOURCES[source]), *mlp(2))
    model = GPipe(module, 2, chunks=2, schedule=schedule, checkpoint="always")
    with pytest.raises((RuntimeError, GpipeError), match=r"layer 2 \('2', Noise\)"):
        step_sum(model, face, torch.randn(4, 6), torch.zeros(4))
    assert all(parameter.grad is None for parameter in model.parameters())


# Without recompute there is nothing to replay: the same layer is nobody's mistake.
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("face", FACES)
def test_case_9_any_source_of_randomness_will_do_without_checkpoints(face, source):
    module = nn.Sequential(*mlp(2), Noise(SOURCES[source]), *mlp(2))
    model = GPipe(module, 2, chunks=2, checkpoint="never")
    step_sum(model, face, torch.randn(4, 6), torch.zeros(4))
    assert all(parameter.grad is not None for parameter in model.parameters())


class Attach(nn.Module):
    """Sends the hidden state along with other things, at a given position among them."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.position = position

    def forward(self, x: Tensor) -> tuple[object, ...]:
        hidden = self.linear(x)
        others = [x > 0, 3, None, {"shift": x.detach(), "scale": hidden.tanh()}]
        return (*others[: self.position], hidden, *others[self.position :])


class Detach(nn.Module):
    """Takes what Attach sent."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position

    def forward(self, values: tuple[object, ...]) -> Tensor:
        mask, power, nothing, more = (*values[: self.position], *values[self.position + 1 :])
        assert mask.dtype is torch.bool
        assert nothing is None
        hidden = values[self.position] ** power * more["scale"] + more["shift"]
        return hidden.masked_fill(mask, 0.5)


# Case 10. Everything but one float tensor at the first position broke something: masks were asked
# for gradients, None had no shape, a dict was sent by its keys.
@pytest.mark.parametrize("position", range(5))
@over_all_ways
def test_case_10_masks_numbers_none_and_dicts_cross_boundaries(
    face, schedule, checkpoint, position
):
    torch.manual_seed(0)
    module = nn.Sequential(Attach(position), nn.Identity(), Detach(position), nn.Linear(6, 6))
    module.double()
    model = GPipe(module, [1, 1, 2], chunks=3, schedule=schedule, checkpoint=checkpoint)
    x, y = torch.randn(2, 7, 6, dtype=torch.float64)
    train_once(model, face, x, y, nn.MSELoss())
    piped = take_gradients(model)
    train_once(module, "backward", x, y, nn.MSELoss())
    assert_same_gradients(piped, take_gradients(module), limit=1e-12)


# Case 11. A boundary's tensor is a leaf of the next stage, and an in-place layer may not write into
# a leaf. (Where it may, it also destroys what the recompute is to start from.)
@over_all_ways
def test_case_11_a_stage_may_start_with_an_in_place_layer(face, schedule, checkpoint):
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)
    ).double()
    model = GPipe(module, [1, 1, 1, 1], chunks=3, schedule=schedule, checkpoint=checkpoint)
    for _ in range(2):  # what a first mini-batch teaches must hold in the second
        x, y = torch.randn(2, 7, 6, dtype=torch.float64)
        train_once(model, face, x.clone(), y, nn.MSELoss())
        piped = take_gradients(model)
        train_once(module, "backward", x.clone(), y, nn.MSELoss())
        assert_same_gradients(piped, take_gradients(module), limit=1e-12)


# Case 12. Nothing in front requires grad, neither tokens nor a frozen embedding, so the checkpoint
# cut the graph and the layers behind got no gradients.
@over_all_ways
def test_case_12_layers_behind_frozen_ones_train(face, schedule, checkpoint):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)).double()
    module[0].requires_grad_(False)
    model = GPipe(module, 3, chunks=2, schedule=schedule, checkpoint=checkpoint)
    tokens, y = torch.tensor([0, 3, 4, 1]), torch.randn(4, 6, dtype=torch.float64)
    train_once(model, face, tokens, y, nn.MSELoss())
    piped = take_gradients(model)
    train_once(module, "backward", tokens, y, nn.MSELoss())
    plain = take_gradients(module)
    assert piped.pop("0.weight") is plain.pop("0.weight") is None
    assert_same_gradients(piped, plain, limit=1e-12)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_case_12_all_layers_frozen_make_an_output_without_graph(checkpoint):
    model = GPipe(mlp().requires_grad_(False), 3, chunks=2, checkpoint=checkpoint)
    assert not model(torch.randn(4, 6)).requires_grad
    with pytest.raises(RuntimeError, match="require"):
        model.step(torch.randn(4, 6), torch.randn(4, 6), nn.MSELoss())


class Counts(nn.Module):
    """Multiplies by the number of its calls, which a buffer keeps."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return x * self.calls.clone()


# Case 13. Counters ran twice as fast where activations were recomputed, and the recompute, which
# met another count than the forward, multiplied by another number.
@pytest.mark.parametrize("in_place", [True, False])
@over_all_ways
def test_case_13_a_counter_counts_micro_batches(face, schedule, checkpoint, in_place):
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity(), Counts(in_place))
    nn.init.ones_(module[0].weight)
    for num_stages in (1, 3):
        model = GPipe(module, num_stages, chunks=3, schedule=schedule, checkpoint=checkpoint)
        model[2].calls.zero_()
        for _ in range(2):  # the calls are 1, 2, 3, then 4, 5, 6
            x = torch.ones(3, 1, requires_grad=True)
            loss = step_sum(model, face, x, torch.zeros(3))
            assert x.grad.flatten().tolist() == [c + model[2].calls.item() for c in (-2, -1, 0)]
            assert loss == x.grad.sum() == take_gradients(model)["0.weight"]
        assert model[2].calls == 6


# Case 13. A hook that logs cannot know by itself that its layer runs a second time.
@over_all_ways
def test_case_13_a_hook_knows_a_recompute(face, schedule, checkpoint):
    model = GPipe(mlp(), 3, chunks=4, schedule=schedule, checkpoint=checkpoint)
    seen = []
    model[2].register_forward_hook(lambda *_: seen.append(is_recomputing()))
    model[2].register_forward_pre_hook(lambda *_: seen.append(is_recomputing()))
    train_once(model, face, torch.randn(8, 6), torch.randn(8, 6), nn.MSELoss())
    assert seen.count(False) == 2 * 4
    assert checkpoint != "never" or not any(seen)
    assert checkpoint != "always" or seen.count(True) == 2 * 4
    assert not is_recomputing()
