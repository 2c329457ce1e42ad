"""What is slow to import, or an extra, is imported when it is needed and not before."""

import subprocess
import sys

import pytest

SLOW = ("torch", "pydantic", "matplotlib", "sklearn", "yaml", "tqdm")


def imported_by(statements: str) -> set[str]:
    """Which of the slow packages a fresh interpreter has imported after `statements`."""
    report = f"\nimport sys\nprint(*[name for name in {SLOW} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", statements + report], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_the_package_imports_no_extras_and_no_configuration() -> None:
    assert not imported_by("import gpipe") & {"pydantic", "matplotlib", "sklearn", "yaml"}


def test_the_public_class_imports_no_extras_and_no_configuration() -> None:
    assert not imported_by("from gpipe import GPipe") & {"pydantic", "matplotlib", "sklearn"}


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_answers_without_torch_and_pydantic(arguments: list[str]) -> None:
    statements = f"""
import runpy, sys
sys.argv = ["gpipe", *{arguments}]
try:
    runpy.run_module("gpipe", run_name="__main__")
except SystemExit as ended:
    assert ended.code == 0
"""
    assert imported_by(statements) == set()
