"""How the layers of a run are measured to balance them."""

import pytest
import torch

from gpipe.train import sample
from gpipe.train.build import build
from gpipe.train.config import RunConfig


def config(**sections: object) -> RunConfig:
    content = {
        "name": "short",
        "model": {"factory": "gpipe.models:mlp", "sizes": [64, 32, 16, 16, 10]},
        "data": {"factory": "gpipe.data:digits", "batch_size": 32},
        "loss": "cross_entropy",
        "optimizer": {"name": "AdamW"},
    }
    return RunConfig.model_validate(content | sections)


@pytest.mark.parametrize("by", ["time", "memory", "flops"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_are_measured_in_the_precision_of_the_run(monkeypatch, by, precision):
    seen = []

    def balancer(num_stages, module, rows, **options):
        seen.append(torch.is_autocast_enabled("cpu"))
        return [3, len(module) - 3]

    monkeypatch.setitem(sample._BALANCERS, by, balancer)
    build(config(pipeline={"stages": 2, "balance": by}, train={"precision": precision}))
    assert seen == [precision == "bf16"]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("pipeline", "num_threads"),
    [
        ({"stages": 4}, 2),
        ({"stages": 4, "schedule": "interleaved_1f1b", "devices": ["cpu", "cpu"]}, 4),
        ({"stages": 4, "devices": ["cpu"] * 4}, 2),
    ],
)
def test_a_layer_is_timed_with_the_threads_of_a_worker(monkeypatch, pipeline, num_threads):
    seen = []

    def profile(module, *_, num_threads, **__):
        seen.append(num_threads)
        raise KeyboardInterrupt

    monkeypatch.setattr("gpipe.balance.profile", profile)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    with pytest.raises(KeyboardInterrupt):
        build(config(pipeline={"balance": "time", **pipeline}))
    assert seen == [num_threads]
