"""The tests of real accelerators, on asynchronous ones: nothing is used too early or too late."""

import sys
from pathlib import Path

import pytest
import torch

from tests.accelerator.backend import needs_compiler, run_alone, run_here

TESTS = Path(__file__).parents[1] / "gpu"
# mse_loss of the CPU resizes an output here, and says so.
OPTIONS = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "ignore::UserWarning"]
# There is no limit to what this backend allocates, but the process ends when it fails.
LEFT_OUT = ["-k", "not without_memory"]


def main() -> None:
    torch.ops.deferred.set_policy(sys.argv[1], 0)
    assert pytest.main([*OPTIONS, *LEFT_OUT, str(TESTS)]) == 0
    assert not (reports := torch.ops.deferred.take_reports()), reports


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
def test_nothing_is_used_before_it_is_there_or_after_it_is_gone(policy):
    run_alone("tests.accelerator.test_engine", policy)


if __name__ == "__main__":
    run_here(main)
