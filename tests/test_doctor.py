"""`gpipe doctor`: what is here, and whether it works."""

import pytest
import torch

import gpipe
from gpipe import doctor
from gpipe.cli import main
from gpipe.profiling import link_bytes_per_s
from gpipe.stage.device import HOST, device_of


def test_it_names_versions_devices_and_links_and_compares(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"gpipe {gpipe.__version__}, Python 3" in text
    assert f"torch {torch.__version__}" in text
    for said in ("torch.distributed: ", "cpu: ", " cores, ", "iB of memory", "iB/s"):
        assert said in text
    assert "two stages on " in text.splitlines()[-1]


@pytest.mark.parametrize("difference", [float("inf"), float("nan"), 1e-3])
def test_other_gradients_are_an_error_after_all_that_is_known(monkeypatch, capsys, difference):
    monkeypatch.setattr(doctor, "compare", lambda places: difference)
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert "torch.distributed: " in out
    assert f"differ from the plain model's by {difference:.1e}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("places", [[HOST], [HOST] * 2, [HOST] * 4])
def test_the_pipeline_has_the_gradients_of_the_plain_model(places):
    assert doctor.compare(places) < 1e-6


def test_a_gradient_that_is_missing_or_no_number_is_seen(monkeypatch):
    monkeypatch.setattr(doctor, "mse_loss", lambda x, y: (x - y).square().mean() * float("nan"))
    assert doctor.compare([HOST] * 2) == float("inf")
    assert doctor._difference(None, torch.ones(2)) == float("inf")


def test_nothing_of_the_callers_is_changed():
    before = torch.get_rng_state()
    doctor.compare([HOST] * 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_copy_has_a_speed():
    assert link_bytes_per_s(device_of(HOST), device_of(HOST)) > 0
