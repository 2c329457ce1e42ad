"""The command line: `gpipe train|plan|balance CONFIG`, `gpipe schedule …`, `gpipe doctor`."""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpipe import __version__
from gpipe.errors import ConfigError, GpipeError, ScheduleError

if TYPE_CHECKING:
    from gpipe.train.config import RunConfig

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
    told = "predict time and memory of a run, or search for a better one"
    _add_plan(commands.add_parser("plan", help=told, allow_abbrev=False))
    told = "cut a model into stages of even cost"
    _add_balance(commands.add_parser("balance", help=told, allow_abbrev=False))
    _add_schedule(commands.add_parser("schedule", help="draw or check one", allow_abbrev=False))
    told = "see whether pipelines work on this machine"
    _add_doctor(commands.add_parser("doctor", help=told, allow_abbrev=False))
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train as a run file says; results go to a new folder in output_dir."
    _add_config(parser)
    parser.set_defaults(command=_train)


def _add_config(parser: argparse.ArgumentParser) -> None:
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


def _load(options: argparse.Namespace) -> "RunConfig":
    # Imported late: `--help` answers at once, without torch and pydantic.
    from gpipe.train.config import load

    config = load(options.config, options.overrides)
    # A run file may name code of the folder it is started in, also from the installed `gpipe`.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return config


def _train(options: argparse.Namespace) -> None:
    config = _load(options)
    from gpipe.train.loop import train
    from gpipe.train.team import is_one_of_many

    if not is_one_of_many():
        _refuse_to_be_alone(config, options)
    train(config)


def _refuse_to_be_alone(config: "RunConfig", options: argparse.Namespace) -> None:
    from gpipe.train.team import torchrun_line

    pipeline = config.pipeline
    if not pipeline.processes and pipeline.replicas == 1:
        return
    asks = "processes is true" if pipeline.processes else f"replicas is {pipeline.replicas}"
    overrides = ["--set", *options.overrides] if options.overrides else []
    raise ConfigError(
        f"pipeline.{asks}, and this is a single process. Start all of them with\n"
        f"    {torchrun_line(config, ['train', options.config, *overrides])}"
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predicts how long a step of the run takes and what each stage needs. Layers are measured "
        "here, or counted, with nothing allocated, where plan.flops says what a device does."
    )
    _add_config(parser)
    _add_profile(parser)
    parser.add_argument(
        "--search",
        action="store_true",
        help="try numbers of devices and micro-batches, balances, schedules and checkpoint modes",
    )
    parser.set_defaults(command=_plan)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    told = "JSON of the layers' costs: read if it is there, else written"
    parser.add_argument("--profile", metavar="FILE", type=Path, help=told)


def _plan(options: argparse.Namespace) -> None:
    config = _load(options)
    from gpipe.train.planning import best_text, run_text

    _print((best_text if options.search else run_text)(config, options.profile))


def _add_balance(parser: argparse.ArgumentParser) -> None:
    parser.description = "Shows each layer's cost and the cuts, and the line for the run file."
    _add_config(parser)
    _add_profile(parser)
    parser.add_argument("--stages", metavar="K", type=int, help="left out: as in the run file")
    parser.add_argument("--by", choices=["time", "memory", "flops", "parameters"], default="time")
    told = "even stages, or the smallest possible slowest one"
    parser.add_argument(
        "--objective", choices=["variance", "bottleneck"], default="variance", help=told
    )
    parser.set_defaults(command=_balance)


def _balance(options: argparse.Namespace) -> None:
    config = _load(options)
    from gpipe.train.planning import balance_text

    num_stages = options.stages if options.stages is not None else _told_stages(config)
    if num_stages is None or num_stages < 1:
        raise ConfigError(
            f"The number of stages is {num_stages}. Pass --stages with a number of at least 1."
        )
    _print(balance_text(config, num_stages, options.by, options.objective, options.profile))


def _told_stages(config: "RunConfig") -> int | None:
    pipeline = config.pipeline
    if not isinstance(pipeline.balance, str):
        return len(pipeline.balance)
    return pipeline.stages or len(pipeline.devices or ()) or config.plan.devices


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


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

    _print(examine())


def _fail(reason: object, code: int) -> int:
    sys.stderr.write(f"gpipe: {reason}\n")
    return code
