"""The command line: `gpipe train CONFIG`, `gpipe schedule show|check FILE`, `gpipe doctor`."""

import argparse
import os
import sys
from collections.abc import Sequence

from gpipe import __version__
from gpipe.errors import ConfigError, GpipeError, ScheduleError

__all__ = ["main"]

# What a shell reports for a program that Ctrl-C has ended: 128 + SIGINT.
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: Those of the command line, without the program's name; default: `sys.argv`.

    Returns:
        The exit code: 0; 2 for a mistake in the command, the run file or a schedule; 1 for another
        error that gpipe has a message for; 130 after Ctrl-C. An exception of the user's own code
        passes through, with its traceback.
    """
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except (ConfigError, ScheduleError) as error:
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
    _add_schedule(commands.add_parser("schedule", help="draw or check one", allow_abbrev=False))
    told = "see whether pipelines work on this machine"
    _add_doctor(commands.add_parser("doctor", help=told, allow_abbrev=False))
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


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.description = "Draws or checks a schedule that is kept in a file."
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command, told in (
        ("show", _show_schedule, "draw it over time"),
        ("check", _check_schedule, "say whether it is complete, in order and free of deadlock"),
    ):
        each = commands.add_parser(name, help=told, description=told, allow_abbrev=False)
        each.add_argument("file", metavar="FILE", help="text; or *.csv, in the form of torch")
        each.set_defaults(command=command)


def _show_schedule(options: argparse.Namespace) -> None:
    from gpipe.schedule import load_schedule
    from gpipe.schedule.summary import summary

    sys.stdout.write(f"{summary(load_schedule(options.file))}\n")


def _check_schedule(options: argparse.Namespace) -> None:
    from gpipe.schedule import check, load_schedule

    held = ", ".join(map(str, check(load_schedule(options.file))))
    sys.stdout.write(
        f"{options.file} is complete, in order and free of deadlock. Its workers hold at most "
        f"{held} micro-batches.\n"
    )


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows versions, devices, memory and how fast copies between devices are, and compares the "
        "gradients of a pipeline of two stages with those of the plain model."
    )
    parser.set_defaults(command=_doctor)


def _doctor(_: argparse.Namespace) -> None:
    from gpipe.doctor import examine

    for line in examine():
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def _fail(reason: object, code: int) -> int:
    sys.stderr.write(f"gpipe: {reason}\n")
    return code
