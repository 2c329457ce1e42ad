"""The command line: `gpipe train CONFIG`."""

import argparse
import os
import sys
from collections.abc import Sequence

from gpipe import __version__
from gpipe.errors import ConfigError, GpipeError

__all__ = ["main"]

# What a shell reports for a program that Ctrl-C has ended: 128 + SIGINT.
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: Those of the command line, without the program's name; default: `sys.argv`.

    Returns:
        The exit code: 0; 2 for a mistake in the command or the run file; 1 for another error that
        gpipe has a message for; 130 after Ctrl-C. An exception of the user's own code passes
        through, with its traceback.
    """
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except ConfigError as error:
        return _fail(error, 2)
    except GpipeError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpipe",
        description="Train PyTorch models in a pipeline over several devices.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gpipe {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_train(commands.add_parser("train", help="train as a run file says", allow_abbrev=False))
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train as a run file says; results go to a new folder in output_dir."
    parser.add_argument("config", metavar="CONFIG", help="the run file, YAML")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="key.path=value",
        nargs="+",
        action="extend",
        default=[],
        help="another value for a key of the run file, e.g. train.epochs=3",
    )
    parser.set_defaults(command=_train)


def _train(options: argparse.Namespace) -> None:
    # Imported late: `--help` answers at once, without torch and pydantic.
    from gpipe.train.config import load

    config = load(options.config, options.overrides)
    # A run file may name code of the folder it is started in, also from the installed `gpipe`.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    from gpipe.train.loop import train

    train(config)


def _fail(reason: object, code: int) -> int:
    sys.stderr.write(f"gpipe: {reason}\n")
    return code
