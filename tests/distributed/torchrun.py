"""Runs `gpipe train` under torchrun, on one machine or on what looks like several."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Ended", "Machine", "free_port", "metrics", "on_machines", "under_torchrun"]

TIMEOUT_S = 150.0

Command = Sequence[str | Path]


class Ended(NamedTuple):
    """How an agent has ended, and what its ranks have said, by local rank."""

    code: int
    out: str
    err: str
    err_of: dict[int, str]


class Machine(NamedTuple):
    """One agent's: what comes before its command, its address, and more options of torchrun."""

    prefix: Command = ()
    options: Command = ()
    environment: tuple[tuple[str, str], ...] = ()


def under_torchrun(*words: str, num_processes: int) -> Ended:
    """`gpipe WORDS` in so many processes."""
    (ended,) = on_machines([Machine(options=["--standalone"])], num_processes, words)
    return ended


def on_machines(
    machines: Sequence[Machine],
    num_each: int,
    words: Sequence[str],
    meanwhile: Callable[[], object] = lambda: None,
) -> list[Ended]:
    """`gpipe WORDS` in so many processes on each machine; relative paths are of this folder."""
    agents = [_started(number, each, num_each, words) for number, each in enumerate(machines)]
    try:
        meanwhile()
        outputs = [agent.communicate(timeout=TIMEOUT_S) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # it ends its ranks
            agent.wait(30)
    return [
        Ended(agent.returncode, out, err, _errors(number))
        for number, (agent, (out, err)) in enumerate(zip(agents, outputs, strict=True))
    ]


def _started(
    number: int, machine: Machine, num_processes: int, words: Sequence[str]
) -> "subprocess.Popen[str]":
    program = [sys.executable, "-m", "torch.distributed.run", *machine.options]
    shape = [f"--nproc-per-node={num_processes}", f"--log-dir=log_{number}", "--tee=2"]
    return subprocess.Popen(
        [*machine.prefix, *program, *shape, "-m", "gpipe", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # torchrun says so, too, but not for a single process.
        env={**os.environ, "OMP_NUM_THREADS": "1", **dict(machine.environment)},
    )


def _errors(number: int) -> dict[int, str]:
    files = Path(f"log_{number}").glob("*/attempt_0/*/stderr.log")
    return {int(each.parent.name): each.read_text() for each in files}


def metrics(name: str) -> list[float]:
    """All losses of a run, and what its evaluations found, in order."""
    lines = Path("runs", name, "metrics.jsonl").read_text().splitlines()
    names = ("loss", "lr", "test_loss", "test_accuracy")
    records = map(json.loads, lines)
    return [record[each] for record in records for each in names if each in record]


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
