import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "wrap_your_model.py"


def test_the_example_learns_the_digits(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")

    printed = capsys.readouterr().out
    accuracy = re.search(r"test accuracy ([\d.]+)%", printed)
    assert accuracy is not None
    assert float(accuracy[1]) > 90
