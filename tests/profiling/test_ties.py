"""Parameters that several layers share."""

import torch
from torch import nn

from gpipe.costs import SharedParameter
from tests.profiling.members import over_all_ways


def tied() -> nn.Sequential:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    module[2].weight = module[0].weight
    module[3].weight = module[0].weight
    module[3].bias = module[1].bias
    module[1].bias.requires_grad_(False)
    return module


@over_all_ways
def test_a_shared_parameter_is_counted_by_each_layer_and_named_once(measure):
    costs = measure(tied(), torch.rand(4, 4))
    assert costs.parameter_bytes == (80, 80, 80, 80)
    assert costs.shared == (
        SharedParameter(layers=(0, 2, 3), parameter_bytes=64, gradient_bytes=64),
        SharedParameter(layers=(1, 3), parameter_bytes=16, gradient_bytes=0),
    )


@over_all_ways
def test_a_parameter_that_one_layer_has_twice_is_not_shared(measure):
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layer[1].weight = layer[0].weight
    costs = measure(nn.Sequential(layer), torch.rand(4, 4))
    assert costs.parameter_bytes == (64 + 16 + 16,)
    assert costs.shared == ()
