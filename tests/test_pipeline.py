"""The class GPipe as its users meet it."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import gpipe
from gpipe import GPipe
from gpipe.errors import PlanError
from tests.members import mlp


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"balance": [3, 3]},
            ValueError,
            r"balance is \[3, 3\], which is 6 layers, .* has 7\. Let",
        ),
        (
            {"balance": [7, 0]},
            ValueError,
            r"balance\[1\] is 0\. Give each stage at least one layer",
        ),
        ({"balance": [8, -1]}, ValueError, r"balance\[1\] is -1\. Give each stage at least one"),
        ({"balance": [3, 4.0]}, TypeError, r"balance\[1\] is 4\.0 of type float\. Give each"),
        ({"balance": [6, True]}, TypeError, r"balance\[1\] is True of type bool"),
        ({"balance": []}, ValueError, r"balance is \[\], which is 0 layers"),
        ({"balance": 0}, ValueError, r"`balance` is 0\. Pass a whole number of at least 1"),
        ({"balance": 8}, PlanError, r"7 layers cannot fill 8 stages"),
        ({"balance": "7"}, TypeError, r"balance is '7' of type str\. Pass"),
        ({"balance": 2, "chunks": 0}, ValueError, r"`chunks` is 0\. Pass a whole number"),
        ({"balance": 2, "chunks": 2.5}, TypeError, r"`chunks` is 2\.5"),
        ({"balance": 2, "checkpoint": "allways"}, ValueError, r"'allways'\. Use one of .*'always'"),
        ({"balance": 2, "schedule": "1f1c"}, ValueError, r"'1f1c'\. Use one of .*'1f1b'"),
        ({"balance": 2, "devices": ["cpu"]}, ValueError, r"2 workers and 1 devices\. Pass"),
        ({"balance": 2, "devices": "cpu"}, TypeError, r"devices is 'cpu'\. Pass a list"),
        ({"devices": torch.device("cpu")}, TypeError, r"devices is device.*\. Pass a list"),
        ({"devices": "cpu"}, TypeError, r"devices is 'cpu'\. Pass a list"),
        ({"balance": 2, "devices": [None, None]}, TypeError, "devices holds None"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value_and_the_remedy(arguments, error, message):
    with pytest.raises(error, match=message):
        GPipe(mlp(), **arguments)


def test_what_is_no_sequential_is_refused():
    with pytest.raises(TypeError, match=r"module is a Linear, not an nn\.Sequential\. Write"):
        GPipe(nn.Linear(2, 2), [1])


def test_a_sequential_with_a_forward_of_its_own_is_refused():
    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(super().forward(x))

    with pytest.raises(TypeError, match=r"Twice has a forward of its own"):
        GPipe(Twice(nn.Linear(2, 2)), [1])


def test_one_module_at_two_places_is_refused_with_the_remedy():
    layer = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"'0' and '2' are.*the same module.*b\.weight = a\.weight"
    ):
        GPipe(nn.Sequential(layer, nn.Tanh(), layer), [1, 2])


def test_one_module_inside_two_layers_is_refused_unless_it_has_nothing_to_train():
    shared = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"'0' and '1' are or contain one Linear"):
        GPipe(nn.Sequential(nn.Sequential(shared), nn.Sequential(nn.Tanh(), shared)), [1, 1])
    activation = nn.Tanh()
    GPipe(nn.Sequential(nn.Sequential(activation), nn.Sequential(activation)), [1, 1])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("wrap", [lambda it: it, nn.Sequential], ids=["layer", "inside"])
def test_a_script_is_refused_with_the_remedy(wrap):
    # It failed in `inspect` before, about an attribute of a class of torch's.
    scripted = wrap(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"Layer '1' .* torch\.jit, .* Give the module that it was"):
        GPipe(nn.Sequential(nn.ReLU(), scripted), [1, 1])


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "fill_drain"])
def test_chunks_may_be_far_more_than_rows(schedule):
    # A schedule for all of them was built and checked first, which took for ever.
    model = GPipe(mlp(), 2, chunks=10**15, schedule=schedule)
    timeline = model.step(*torch.rand(2, 3, 6), nn.MSELoss()).timeline
    assert {event.action.microbatch for event in timeline.events} == {0, 1, 2}


def test_an_empty_sequential_is_refused():
    with pytest.raises(ValueError, match="no layer"):
        GPipe(nn.Sequential(), [1])


def test_it_is_a_sequential_to_its_reader():
    module = mlp()
    model = GPipe(module, [3, 4])
    assert len(model) == 7
    assert list(model) == list(module)
    assert model[0] is module[0]
    assert model[-1] is module[-1]
    assert list(model[2:4]) == list(module[2:4])
    assert model.balance == [3, 4]
    assert [list(stage) for stage in model.stages] == [list(module[:3]), list(module[3:])]
    assert model.devices == [torch.device("cpu")] * 2
    with pytest.raises(IndexError):
        model[7]


@pytest.mark.parametrize("balance", [[1, 2], [2, 1], [1, 1, 1]])
def test_state_dict_has_the_names_of_the_plain_module(balance):
    def named():
        return nn.Sequential(
            OrderedDict(embed=nn.Linear(2, 3), stages=nn.BatchNorm1d(3), chunks=nn.Linear(3, 1))
        )

    plain, wrapped = named(), GPipe(named(), balance)
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    wrapped.load_state_dict(plain.state_dict())
    plain.load_state_dict(wrapped.state_dict())
    assert [name for name, _ in wrapped.named_parameters()] == list(dict(plain.named_parameters()))


def test_balance_by_number_deals_out_the_parameter_bytes():
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))
    assert GPipe(module, 2).balance == [2, 2]


def test_eval_makes_no_graph_and_takes_any_batch_size():
    model = GPipe(mlp(), 3, chunks=4).eval()
    plain = mlp().eval()
    for num_rows in (0, 1, 3, 8):
        x = torch.randn(num_rows, 6)
        output = model(x)
        assert not output.requires_grad
        torch.testing.assert_close(output, plain(x))


def test_step_in_eval_mode_gives_the_loss_only():
    model = GPipe(mlp(), 3, chunks=4).eval()
    x, y = torch.randn(5, 6), torch.randn(5, 6)
    result = model.step(x, y, nn.MSELoss(), return_output=True)
    torch.testing.assert_close(result.loss, nn.MSELoss()(model(x), y))
    torch.testing.assert_close(result.output, model(x))
    assert result.timeline is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_step_gives_output_and_timeline_on_request():
    model = GPipe(mlp(), 2, chunks=4)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    result = model.step(x, y, nn.MSELoss(), return_output=True)
    torch.testing.assert_close(result.output, model.eval()(x))
    assert not result.output.requires_grad
    assert model.step(x, y, nn.MSELoss()).output is None


@pytest.mark.parametrize("name", ["fill_drain", "1f1b"])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_what_was_done_is_what_the_schedule_says(name, checkpoint):
    from gpipe.schedule import add_recompute, resolve

    model = GPipe(mlp(), 3, chunks=4, schedule=name, checkpoint=checkpoint)
    timeline = model.step(torch.randn(8, 6), torch.randn(8, 6), nn.MSELoss()).timeline
    assert timeline.rows == add_recompute(resolve(name, 3, 4), checkpoint).rows
    assert 0 < timeline.bubble < 1


def test_zero_rows_are_refused_in_training():
    model = GPipe(mlp(), 2)
    with pytest.raises(ValueError, match=r"The mini-batch has 0 rows"):
        model(torch.ones(0, 6))


def test_inputs_that_disagree_on_their_rows_are_refused_by_name():
    # torchtitan PR #4098: peers return two of the four rows in silence.
    model = GPipe(nn.Sequential(nn.Identity()), [1], chunks=2)
    with pytest.raises(ValueError, match=r"0 of input has 4 rows and tensor 1 of input has 1"):
        model((torch.ones(4, 2), torch.ones(1, 2)))
    with pytest.raises(ValueError, match=r"input has 4 rows and tensor 0 of target has 3"):
        model.step(torch.ones(4, 2), torch.ones(3, 2), nn.MSELoss())


def test_the_public_list():
    assert gpipe.__all__ == [
        "GPipe",
        "Namespace",
        "StepResult",
        "clip_grad_norm_",
        "is_recomputing",
        "pop",
        "skippable",
        "stash",
    ]
    assert all(hasattr(gpipe, name) for name in gpipe.__all__)
    assert set(gpipe.__all__) <= set(dir(gpipe))
    with pytest.raises(AttributeError, match="no attribute 'Gpipe'"):
        gpipe.Gpipe  # noqa: B018 - the access is what is tested


@pytest.mark.parametrize("move", [lambda m: m.to("meta"), lambda m: m.to_empty(device="meta")])
def test_a_model_cannot_be_moved_away_from_its_stages(move):
    model = GPipe(mlp(4), [2, 2])
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"live on cpu, cpu, and its parameters cannot be moved"):
        move(model)
    assert all(map(torch.equal, model.parameters(), before))


def test_a_model_may_change_its_dtype_where_it_is():
    model = GPipe(mlp(4), [2, 2], chunks=2).double().to("cpu")
    assert model(torch.randn(4, 6).double()).dtype == torch.float64
