"""`torchrun -m gpipe train` computes what `gpipe train` does, on whatever machines.

Starting a process takes seconds, so most of it is slow:

    ./scripts/test --slow tests/distributed/test_torchrun.py
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpipe.cli import main
from tests.distributed.torchrun import (
    Machine,
    free_port,
    metrics,
    on_machines,
    under_torchrun,
)
from tests.members import intra_op_threads

pytestmark = pytest.mark.distributed

RUN_FILE = """
name: short
model: {factory: "gpipe.models:mlp", sizes: [64, 32, 32, 32, 10]}
data: {factory: "gpipe.data:digits", batch_size: 256}
loss: cross_entropy
pipeline: {stages: 2, chunks: 4}
optimizer: {name: AdamW, lr: 0.01}
lr_schedule: {name: cosine, warmup_steps: 3}
train: {epochs: 2, clip_grad_norm: 1.0}
"""

# In the second epoch, in the last of three stages.
USERS_OWN = """
from torch import nn

class Faulty(nn.Module):
    num_calls = 0

    def forward(self, input):
        Faulty.num_calls += self.training
        if Faulty.num_calls > 30:
            raise RuntimeError("a fault of the layer")
        return input

def faulty():
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10), Faulty())
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is a user in a folder with a run file and a module."""
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    (tmp_path / "users_model.py").write_text(USERS_OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def words_of(name: str, *overrides: str) -> list[str]:
    return ["train", "run.yaml", "--set", f"name={name}", *overrides]


def alone(*overrides: str) -> list[float]:
    """What one process computes; bits depend on the number of intra-op threads."""
    with intra_op_threads(1):
        assert main(words_of("alone", *overrides)) == 0
    return metrics("alone")


def test_the_line_that_is_told_starts_the_same_run(capsys, monkeypatch):
    words = words_of("pair", "pipeline.processes=true")
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("gpipe: pipeline.processes is true, and this is a single process. Start")
    assert not Path("runs").exists()
    line = told.splitlines()[-1].strip()
    assert line == shlex.join(["torchrun", "--nproc-per-node=2", "-m", "gpipe", *words])

    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    ended = subprocess.run(shlex.split(line), timeout=150, capture_output=True, text=True)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("run directory: runs/pair\n") == 1  # one rank speaks for all
    assert "test accuracy" in ended.stdout.splitlines()[-1]
    assert {path.name for path in Path("runs").iterdir()} == {"pair"}
    assert metrics("pair") == alone()


@pytest.mark.slow
def test_replicas_compute_the_same_together():
    ended = under_torchrun(*words_of("four", "pipeline.replicas=2"), num_processes=4)
    assert ended.code == 0, ended.err
    assert metrics("four") == pytest.approx(alone(), rel=1e-6, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "overrides"),
    [
        (4, ["pipeline.stages=4"]),
        (4, ["pipeline.stages=4", "pipeline.schedule=fill_drain", "pipeline.checkpoint=always"]),
        (2, ["pipeline.stages=4", "pipeline.schedule=interleaved_1f1b"]),
        (2, ["pipeline.stages=4", "pipeline.schedule=looped_breadth_first"]),
        (3, ["pipeline.balance=[1, 1, 5]", "pipeline.stages=3"]),
        (2, ["model.dropout=0.3"]),
        (1, ["pipeline.stages=1"]),
    ],
)
def test_every_run_has_the_bits_of_one_process(num_processes, overrides):
    if "model.dropout=0.3" in overrides:
        overrides = [
            "model={factory: 'gpipe.models:transformer', num_blocks: 2, width: 16, num_heads: 2,"
            " vocabulary: 256, dropout: 0.3}",
            "data={factory: 'gpipe.data:text', path: run.yaml, num_tokens: 16, batch_size: 4}",
            "loss=gpipe.models:next_token_loss",
        ]
    ended = under_torchrun(*words_of("many", *overrides), num_processes=num_processes)
    assert ended.code == 0, ended.err
    assert metrics("many") == alone(*overrides)


@pytest.mark.slow
@pytest.mark.parametrize("all_reduce", ["ring", "none"])
def test_replicas_sum_as_the_file_says(all_reduce):
    overrides = "pipeline.replicas=2", f"pipeline.all_reduce={all_reduce}"
    ended = under_torchrun(*words_of("four", *overrides), num_processes=4)
    assert ended.code == 0, ended.err
    found, expected = metrics("four"), alone()
    assert (found == pytest.approx(expected, rel=1e-6, abs=1e-6)) is (all_reduce == "ring")


MISTAKES = {
    "replicas that do not divide": (
        ["pipeline.replicas=2"],
        3,
        "pipeline.replicas: is 2, and there are 3 processes, which cannot be shared out to so",
    ),
    "devices": (["pipeline.devices=[cpu, cpu]"], 2, "pipeline.devices: lists devices, and each"),
    "too many processes": (
        [],
        3,
        "The schedule has 2 workers and the mesh has 3 along 'pipe'. Let the two be equal",
    ),
    "a list for other processes": (
        ["pipeline.balance=[3, 2, 2]", "pipeline.stages=3"],
        2,
        "The schedule has 3 workers and the mesh has 2 along 'pipe'. Let the two be equal",
    ),
    "fewer rows than replicas": (
        ["pipeline.replicas=2", "data.batch_size=1437"],
        2,
        "data.batch_size: is 1437, which leaves a mini-batch of 1 of the 1438 rows for 2 replicas.",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_without_a_traceback(mistake):
    overrides, num_processes, told = MISTAKES[mistake]
    ended = under_torchrun(*words_of("wrong", *overrides), num_processes=num_processes)
    assert ended.code == 1  # it is that of torchrun
    assert not Path("runs").exists()
    said = [each for each in ended.err_of.values() if each]  # torchrun ends those that are slow
    assert any(each.startswith("gpipe: 1 mistake in ") for each in said)
    for each in said:
        assert "Traceback" not in each
        assert told in each
    assert "exitcode  : 2" in ended.err


@pytest.mark.slow
def test_every_rank_names_the_one_that_failed_first():
    overrides = "model={factory: 'users_model:faulty'}", "pipeline={stages: 3, chunks: 4}"
    ended = under_torchrun(*words_of("faulty", *overrides), num_processes=3)
    assert ended.code == 1
    place = "in stage 2, layer 2 ('2', Faulty), micro-batch"
    first, second, faulty = (ended.err_of[rank] for rank in range(3))
    for each in first, second:
        assert "ends, since another has failed." in each
        assert f"Rank 2 failed first {place}" in each
        assert "RuntimeError: a fault of the layer" in each
        assert "Traceback" not in each
    assert "Traceback" in faulty
    assert f"gpipe: {place}" in faulty


def two_machines(*rendezvous: str) -> list[Machine]:
    return [
        Machine(options=["--nnodes=2", f"--node-rank={number}", *rendezvous]) for number in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_two_agents_are_one_run(kind):
    port = free_port()
    rendezvous = {
        "static": ["--master-addr=127.0.0.1", f"--master-port={port}"],
        "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=one"],
    }[kind]
    words = words_of("machines", "pipeline.stages=4")
    both = on_machines(two_machines(*rendezvous), 2, words)
    assert [ended.code for ended in both] == [0, 0], both
    assert sum("run directory" in ended.out for ended in both) == 1
    assert metrics("machines") == alone("pipeline.stages=4")


NAMES = ("gpipe-test-a", "gpipe-test-b")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def join_by_a_cable() -> None:
    ip(
        "link",
        "add",
        "gpipe0",
        "netns",
        NAMES[0],
        "type",
        "veth",
        "peer",
        "gpipe1",
        "netns",
        NAMES[1],
    )
    for number, name in enumerate(NAMES):
        ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"gpipe{number}")
        for device in "lo", f"gpipe{number}":
            ip("-n", name, "link", "set", device, "up")


@pytest.fixture
def networks() -> Iterator[list[Machine]]:
    """Two machines with networks of their own and a cable in between."""
    if shutil.which("ip") is None:
        pytest.skip("there is no program `ip` (of iproute2) here")
    made = []
    try:
        for name in NAMES:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network of one's own can be made here: {error.stderr}")
            made.append(name)
        join_by_a_cable()
        yield [in_network(number) for number in range(2)]
    finally:
        for name in made:
            ip("netns", "del", name)


def in_network(number: int) -> Machine:
    return Machine(
        prefix=["ip", "netns", "exec", NAMES[number]],
        options=[
            "--nnodes=2",
            f"--node-rank={number}",
            "--master-addr=10.77.0.1",
            "--master-port=29500",
        ],
        environment=(("GLOO_SOCKET_IFNAME", f"gpipe{number}"),),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["pipeline.stages=4"],
        ["pipeline.replicas=2"],
        ["pipeline.replicas=2", "pipeline.all_reduce=ring"],
    ],
)
def test_machines_with_networks_of_their_own_are_one_run(networks, overrides):
    both = on_machines(networks, 2, words_of("networks", *overrides))
    assert [ended.code for ended in both] == [0, 0], both
    of_one_process = [each for each in overrides if "stages" in each]
    assert metrics("networks") == pytest.approx(alone(*of_one_process), rel=1e-6, abs=1e-6)


def cut_the_cable() -> None:
    """Once they train."""
    metrics_file = Path("runs/cut/metrics.jsonl")
    deadline_s = time.monotonic() + 90
    while not (metrics_file.exists() and metrics_file.stat().st_size > 1000):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    ip("-n", NAMES[0], "link", "set", "gpipe0", "down")


@pytest.mark.slow
def test_machines_that_cannot_reach_each_other_any_more_end(networks):
    """Rank 0 and the store are on the first one."""
    words = words_of("cut", "pipeline.stages=4", "train.epochs=100000")
    first, second = on_machines(networks, 2, words, meanwhile=cut_the_cable)
    assert [ended.code for ended in (first, second)] == [1, 1]
    for err in first.err_of.values():
        assert "Rank 2 failed first: it has given no sign of life for 8 s" in err
    for err in second.err_of.values():
        assert "The store failed first: its host does not answer" in err
