"""Layers whose costs can be added up by hand."""

import random

from gpipe.costs import LayerCosts, LayerMemory

__all__ = ["layer_costs", "random_layers"]


def layer_costs(
    times_s=(1.0, 1.0, 1.0, 1.0), *, parameter_bytes=None, saved_bytes=None, boundary_bytes=10.0
) -> LayerCosts:
    """One row, layers that save one storage each besides their input; a backward takes twice.

    Args:
        times_s: Of each layer's forward, for one row.
        parameter_bytes: Of each layer; its gradient is as large.
        saved_bytes: Of each layer and row.
        boundary_bytes: What is between layers, of a row.
    """
    num_layers = len(times_s)
    parameter_bytes = parameter_bytes or [100.0] * num_layers
    saved_bytes = saved_bytes or [20.0] * num_layers
    return LayerCosts(
        names=tuple(map(str, range(num_layers))),
        rows=1,
        dtype="float32",
        device="cpu",
        memory=LayerMemory(
            storages=[(0.0, number) for number in saved_bytes],
            saved=[(layer,) for layer in range(num_layers)],
            written=[() for _ in range(num_layers)],
            boundaries=[[(None, (0.0, boundary_bytes))] for _ in range(num_layers + 1)],
        ),
        forward_s=times_s,
        backward_s=[2 * time_s for time_s in times_s],
        parameter_bytes=parameter_bytes,
        gradient_bytes=parameter_bytes,
    )


def random_layers(seed: int, num_layers: int = 7) -> LayerCosts:
    """Layers of uneven costs."""
    numbers = random.Random(seed)
    return layer_costs(
        [numbers.choice([0.5, 1.0, 2.0, 5.0]) for _ in range(num_layers)],
        parameter_bytes=[float(numbers.randint(50, 400)) for _ in range(num_layers)],
        saved_bytes=[float(numbers.randint(5, 90)) for _ in range(num_layers)],
    )
