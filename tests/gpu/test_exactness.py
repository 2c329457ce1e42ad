"""On real accelerators: the plain model's gradients, and the same bits whatever the cut."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from gpipe import GPipe
from gpipe.stage.device import HOST
from tests.gpu.devices import needs_accelerator, places, precision
from tests.layers import Head, Pop, Stash
from tests.members import mlp, over_all_ways, relative_difference, take_gradients, train_once

pytestmark = [pytest.mark.gpu, needs_accelerator]

ROWS, WIDTH, CHUNKS = 10, 6, 4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def plain_layers() -> list[nn.Module]:
    return list(mlp(7, WIDTH))


def with_skip() -> list[nn.Module]:
    first, *others = mlp(5, WIDTH)
    return [first, Stash(), *others, Pop()]


def with_tie() -> list[nn.Module]:
    layers = list(mlp(6, WIDTH))
    return [*layers, Head(layers[0].weight)]


def by_hand(layers: list[nn.Module], x: Tensor) -> Tensor:
    """What the layers compute, a skip included, without a pipeline."""
    kept = None
    for layer in layers:
        if isinstance(layer, Stash):
            kept, x = x * 3, x * 2
        else:
            x = x + kept if isinstance(layer, Pop) else layer(x)
    return x


@over_all_ways
@pytest.mark.parametrize("layers", [plain_layers, with_skip, with_tie])
@pytest.mark.parametrize("balance", [[4, 3], [2, 3, 2]])
@pytest.mark.parametrize("from_host", [True, False])
def test_gradients_are_those_of_the_plain_model(
    face, schedule, checkpoint, layers, balance, from_host
):
    dtype, devices = precision(), places(len(balance))
    plain = nn.Sequential(*layers()).to(dtype=dtype)
    module = nn.Sequential(*layers()).to(dtype=dtype)
    model = GPipe(
        module, balance, CHUNKS, devices=devices, schedule=schedule, checkpoint=checkpoint
    )
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randn(2, ROWS, WIDTH).to(dtype)
        mse_loss(by_hand(list(plain), x), y).backward()
        mine = x if from_host else x.to(devices[0])
        target = y if from_host and face == "step" else y.to(devices[-1])
        train_once(model, face, mine, target, mse_loss)
        expected = take_gradients(plain)
        for name, gradient in take_gradients(model).items():
            its = expected[name].to(gradient.device)
            assert relative_difference(gradient, its) <= TOLERANCE[dtype], name


@over_all_ways
def test_a_stage_may_be_on_the_host(face, schedule, checkpoint):
    first, last = places(2)
    model = GPipe(
        nn.Sequential(*plain_layers()), [2, 3, 2], CHUNKS, devices=[first, HOST, last],
        schedule=schedule, checkpoint=checkpoint,
    )  # fmt: skip
    plain = nn.Sequential(*plain_layers())
    x, y = torch.randn(2, ROWS, WIDTH)
    mse_loss(plain(x), y).backward()
    for _ in range(3):
        train_once(model, face, x, y if face == "step" else y.to(last), mse_loss)
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), its.grad)
        model.zero_grad()


@over_all_ways
def test_the_cut_changes_no_bit_dropout_on(face, schedule, checkpoint):
    results = []
    for balance in ([6], [3, 3], [1, 2, 3]):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh()]
        layers += [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh()]
        model = GPipe(
            nn.Sequential(*layers), balance, CHUNKS, devices=places(len(balance)),
            schedule=schedule, checkpoint=checkpoint,
        )  # fmt: skip
        torch.manual_seed(1)
        x, y = torch.randn(2, ROWS, WIDTH)
        for _ in range(3):
            target = y if face == "step" else y.to(model.devices[-1])
            loss = train_once(model, face, x, target, mse_loss)
        results.append([loss.cpu(), *(p.grad.cpu() for p in model.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@over_all_ways
def test_deferred_statistics_are_those_of_the_whole_mini_batch(face, schedule, checkpoint):
    norms = [nn.BatchNorm1d(WIDTH, momentum=0.3) for _ in range(2)]
    plain = nn.Sequential(nn.BatchNorm1d(WIDTH, momentum=0.3)).to(places(1)[0])
    model = GPipe(
        nn.Sequential(norms[0], nn.Linear(WIDTH, WIDTH), norms[1]), [1, 2], CHUNKS,
        devices=places(2), schedule=schedule, checkpoint=checkpoint, deferred_batch_norm=True,
    )  # fmt: skip
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randn(2, ROWS, WIDTH)
        plain(x.to(places(1)[0]))
        train_once(model, face, x, y if face == "step" else y.to(model.devices[-1]), mse_loss)
    torch.testing.assert_close(norms[0].running_mean, plain[0].running_mean)
    torch.testing.assert_close(norms[0].running_var, plain[0].running_var)
    assert [int(norm.num_batches_tracked) for norm in norms] == [3, 3]


def test_a_weighted_loss_is_that_of_the_mini_batch():
    model = GPipe(nn.Sequential(*plain_layers()), [4, 3], CHUNKS, devices=places(2))
    plain = nn.Sequential(*plain_layers())
    target = torch.tensor([0, -100, 1, 2, -100, -100, 3, 4, 5, 0])
    x = torch.randn(ROWS, WIDTH)
    loss = cross_entropy(plain(x), target)
    loss.backward()
    torch.testing.assert_close(model.step(x, target, cross_entropy).loss.cpu(), loss.detach())
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), its.grad)


@pytest.mark.parametrize("in_turn", [True, False])
def test_evaluation_gives_the_plain_output(in_turn):
    model = GPipe(nn.Sequential(*plain_layers()), [4, 3], CHUNKS, devices=places(2)).eval()
    plain = nn.Sequential(*plain_layers()).eval()
    for rows in (1, 3, ROWS):
        x = torch.randn(rows, WIDTH)
        with torch.inference_mode(in_turn):
            torch.testing.assert_close(model(x).cpu(), plain(x), check_device=False)
