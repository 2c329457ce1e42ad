"""Law 5: gradients arrive once per mini-batch, as on a plain module."""

import copy
import signal
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.laws.delivery import (
    assert_same_gradients,
    batch,
    gradients_of,
    piped,
    train,
)
from tests.members import CHECKPOINT_MODES, mlp, over_all_ways, take_gradients, train_once


@over_all_ways
def test_hooks_fire_once_with_the_whole_gradient(face, schedule, checkpoint):
    module = mlp().double()
    expected = gradients_of(module, "backward")
    model = piped(module, schedule, checkpoint)
    in_hook: list[tuple[str, Tensor]] = []
    after_hook: list[tuple[str, Tensor]] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: in_hook.append((name, gradient)))
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=name: after_hook.append((name, parameter.grad.clone()))
        )
    x, y = batch()
    x.requires_grad_().register_hook(lambda gradient: in_hook.append(("x", gradient)))
    train_once(model, face, x, y, nn.MSELoss())
    assert sorted(name for name, _ in in_hook) == sorted([*expected, "x"])
    assert sorted(name for name, _ in after_hook) == sorted(expected)
    assert_same_gradients(dict(after_hook), expected)


# What a hook returns takes the gradient's place, so it must see the sum, not the parts: clipping
# each micro-batch by itself is another thing.
@over_all_ways
def test_a_hook_may_change_the_gradient(face, schedule, checkpoint):
    module = mlp().double()
    expected = {n: g.clamp(-0.01, 0.01) for n, g in gradients_of(module, "backward").items()}
    model = piped(module, schedule, checkpoint)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    assert_same_gradients(gradients_of(model, face), expected)


# An optimizer that steps in the hook of each parameter and drops the gradient at once saves the
# memory of all gradients. It must not step while a stage still computes with the parameter.
@over_all_ways
def test_an_optimizer_may_step_in_the_hooks(face, schedule, checkpoint):
    module, plain = mlp().double(), mlp().double()
    model = piped(module, schedule, checkpoint)

    def step(parameter: nn.Parameter) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.register_post_accumulate_grad_hook(step)
    for seed in range(3):
        train(model, face, seed)
        train(plain, "backward", seed)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


class Spare(nn.Linear):
    """Has a parameter that its forward leaves out."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.spare = nn.Parameter(torch.ones(2))


@over_all_ways
def test_a_parameter_without_gradient_is_left_in_peace(face, schedule, checkpoint):
    module = nn.Sequential(Spare(), nn.Tanh(), Spare()).double()
    module[0].weight.requires_grad_(False)
    fired = []
    module[2].spare.register_hook(lambda _: fired.append("hook"))
    module[2].spare.register_post_accumulate_grad_hook(lambda _: fired.append("after"))
    expected = gradients_of(module, "backward")
    assert_same_gradients(gradients_of(piped(module, schedule, checkpoint), face), expected)
    assert not fired


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_autograd_grad_has_no_side_effect(checkpoint):
    module = mlp().double()
    model = piped(module, checkpoint=checkpoint)
    parameters = list(model.parameters())
    x, _ = batch()
    x.requires_grad_()
    after_hook = []
    parameters[0].register_post_accumulate_grad_hook(after_hook.append)
    for wanted in (x, parameters[0], [parameters[3]], [*parameters, x]):
        mine = torch.autograd.grad(model(x).square().sum(), wanted)
        plain = torch.autograd.grad(module(x).square().sum(), wanted)
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in parameters)
    assert not after_hook


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_backward_with_inputs_reaches_these_only(checkpoint):
    module = mlp().double()
    model = piped(module, checkpoint=checkpoint)
    expected = gradients_of(module, "backward")
    x, y = batch()
    wanted = "2.weight"
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward(inputs=[dict(model.named_parameters())[wanted]])
    mine = take_gradients(model)
    assert [name for name, gradient in mine.items() if gradient is not None] == [wanted]
    torch.testing.assert_close(mine[wanted], expected[wanted], rtol=1e-12, atol=1e-12)


# The pipeline may be any part of a graph: what comes before and behind it gets its gradients.
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_pipeline_inside_a_larger_graph(checkpoint):
    torch.manual_seed(0)
    before, module, behind = nn.Linear(6, 6).double(), mlp().double(), nn.Linear(6, 6).double()
    whole = nn.ModuleList([before, module, behind])
    model = piped(module, checkpoint=checkpoint)
    x, _ = batch()

    def run(middle: nn.Module) -> dict[str, Tensor | None]:
        hidden = before(x)
        (behind(middle(hidden)) * hidden + middle(x * 2)).square().sum().backward()
        return take_gradients(whole)

    assert_same_gradients(run(model), run(module))


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_second_backward_is_refused(checkpoint):
    model = piped(mlp().double(), checkpoint=checkpoint)
    x, y = batch()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward(retain_graph=True)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=r"second backward through the output of a GPipe"):
        loss.backward()
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_double_backward_is_refused(checkpoint):
    module = mlp().double()
    model = piped(module, checkpoint=checkpoint)
    x, _ = batch()
    x.requires_grad_()
    with pytest.raises(RuntimeError, match=r"create_graph=True through the output of a GPipe"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same_gradients(gradients_of(model, "backward"), gradients_of(module, "backward"))


@over_all_ways
def test_gradients_are_added_to_what_is_there(face, schedule, checkpoint):
    module = mlp().double()
    model = piped(module, schedule, checkpoint)
    first, second = gradients_of(model, face, 1), gradients_of(model, face, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    there = [parameter.grad for parameter in model.parameters()]
    train(model, face, 1)
    train(model, face, 2)
    for parameter, gradient in zip(model.parameters(), there, strict=True):
        assert parameter.grad is gradient, "what is there is added to in place, as torch does"
    for name, gradient in take_gradients(model).items():
        assert torch.equal(gradient, 7.0 + first[name] + second[name])


# Two outputs may be alive at once, and be differentiated in any order or together.
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_two_mini_batches_in_flight(checkpoint):
    module = mlp().double()
    model = piped(module, checkpoint=checkpoint)
    (x1, y1), (x2, y2) = batch(1), batch(2)

    def losses(trained: nn.Module) -> tuple[Tensor, Tensor]:
        first, second = trained(x1), trained(x2)
        return (first - y1).square().sum(), (second - y2).square().sum()

    sum(losses(module)).backward()
    expected = take_gradients(module)
    sum(losses(model)).backward()
    assert_same_gradients(take_gradients(model), expected)
    for loss in losses(model):
        loss.backward()
    assert_same_gradients(take_gradients(model), expected)


@pytest.fixture
def one_rank_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=["plain", "bucket views", "unused"],
)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_in_distributed_data_parallel(one_rank_group, checkpoint, options):
    module = mlp().double()
    # Buckets as small as can be: several of them, each of which waits for its parameters.
    replica = DistributedDataParallel(
        piped(module, checkpoint=checkpoint), bucket_cap_mb=0.0001, **options
    )
    for seed in range(3):
        assert_same_gradients(
            gradients_of(replica.module, "backward", seed), gradients_of(module, "backward", seed)
        )
        train(replica, "backward", seed)
        mine = take_gradients(replica.module)
        assert_same_gradients(mine, gradients_of(module, "backward", seed))
    with replica.no_sync():
        train(replica, "backward", 0)
    train(replica, "backward", 0)
    doubled = {n: 2 * g for n, g in gradients_of(copy.deepcopy(module), "backward").items()}
    assert_same_gradients(take_gradients(replica.module), doubled)


class Tied(nn.Module):
    """Projects with the transposed weight of another layer."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@over_all_ways
def test_tied_parameters_get_one_sum(face, schedule, checkpoint):
    module = mlp(4).double()
    module.append(Tied(module[0]))
    module[2].weight = module[0].weight
    expected = gradients_of(module, "backward")
    model = piped(module, schedule, checkpoint)
    fired = []
    module[0].weight.register_post_accumulate_grad_hook(fired.append)
    for _ in range(2):
        assert_same_gradients(gradients_of(model, face), expected)
    assert len(fired) == 2


class Closure(nn.Module):
    """Computes with a parameter that is not its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.read = lambda: weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.read()


@over_all_ways
def test_a_parameter_in_a_closure_is_named(face, schedule, checkpoint):
    module = mlp(4).double()
    module.append(Closure(module[2].weight))
    model = piped(module, schedule, checkpoint)
    with pytest.raises(RuntimeError, match=r"gradient of 2\.weight"):
        train(model, face)
    assert all(parameter.grad is None for parameter in model.parameters())


# Ctrl-C hits the caller, who waits, while a worker computes. It must come out of `step`, or of
# `backward`, as what it is, and leave a model that can go on.
@over_all_ways
def test_ctrl_c_leaves_nothing_behind(face, schedule, checkpoint):
    class Interrupts(nn.Module):
        armed = True

        def forward(self, x: Tensor) -> Tensor:
            return InterruptsBackward.apply(x, self)

    class InterruptsBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, layer):
            ctx.layer = layer
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if ctx.layer.armed:
                ctx.layer.armed = False
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            return gradient, None

    module = nn.Sequential(*mlp(3), Interrupts(), *mlp(2)).double()
    model = piped(module, schedule, checkpoint)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    with pytest.raises(KeyboardInterrupt):
        train(model, face)
    assert all((gradient == 7.0).all() for gradient in take_gradients(model).values())
    assert_same_gradients(gradients_of(model, face), gradients_of(module, "backward"))
