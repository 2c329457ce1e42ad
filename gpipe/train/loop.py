"""The training loop: epochs, steps, evaluations."""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from gpipe import clip_grad_norm_
from gpipe.pipeline import StepResult
from gpipe.timeline import Timeline
from gpipe.train.batches import Batch, num_rows, shuffled
from gpipe.train.build import Run, build
from gpipe.train.config import RunConfig
from gpipe.train.evaluation import Evaluation, evaluate
from gpipe.train.metrics import MetricsFile
from gpipe.train.run_directory import create_run_directory
from gpipe.train.summary import summary, warn_of_bubble
from gpipe.train.tally import Tally
from gpipe.train.team import Team, joined
from gpipe.train.terminal import Bar, say, speaking, warn

__all__ = ["Result", "train"]


@dataclass(frozen=True)
class Result:
    """What a finished run leaves.

    Attributes:
        directory: The run directory, with config.yaml and metrics.jsonl.
        run: The model and all that trained it.
        evaluation: Of the last epoch.
        tally: Rows, seconds and waiting of all steps.
    """

    directory: Path
    run: Run
    evaluation: Evaluation
    tally: Tally


def train(config: RunConfig) -> Result:
    """Trains as the run file says, and keeps configuration and metrics in a new run directory.

    Raises:
        ConfigError: Something in the run file cannot be had; nothing was started or written.
        KeyboardInterrupt: Ctrl-C; what was written is whole.
    """
    with joined(config) as team, speaking(team.is_main):
        return _train(build(config, team), team)


def _train(run: Run, team: Team) -> Result:
    warn_of_bubble(run)
    directory = team.told(create_run_directory(run.config) if team.is_main else Path())
    with MetricsFile(directory / "metrics.jsonl") if team.is_main else nullcontext() as metrics:
        trainer = _Trainer(run, metrics, team)
        try:
            evaluation = trainer.train()
        except KeyboardInterrupt:
            warn(f"stopped after step {trainer.step}. What was recorded is in {directory}.")
            raise
    say(f"run directory: {directory}")
    say(summary(run, evaluation, trainer.tally))
    return Result(directory, run, evaluation, trainer.tally)


class _Trainer:
    """Takes a run through its epochs."""

    def __init__(self, run: Run, metrics: MetricsFile | None, team: Team) -> None:
        self.step = 0
        self.epoch = 0
        self.tally = Tally()
        self._run = run
        self._metrics = metrics
        self._team = team

    def train(self) -> Evaluation:
        """All epochs; the evaluation after the last one."""
        for _ in range(self._run.config.train.epochs):
            self.epoch += 1
            loss = self._train_epoch()
            evaluation = self._evaluate()
            speed = f"{self.tally.rows_per_s:,.0f} rows/s"
            say(f"epoch {self.epoch}: training loss {loss:.4f}, {evaluation}, {speed}")
        return evaluation

    def _train_epoch(self) -> float:
        """The mean of the losses over the epoch's rows."""
        config, rows = self._run.config, self._run.splits.train
        batches = shuffled(rows, config.data.batch_size, seed=config.seed, epoch=self.epoch)
        loss_of_rows = 0.0
        with Bar(f"epoch {self.epoch}/{config.train.epochs}", num_rows(rows)) as bar:
            started_s = time.perf_counter()
            for batch in batches:
                loss = self._train_step(batch, started_s)
                loss_of_rows += loss * batch.num_rows
                bar.show(batch.num_rows, loss)
                started_s = time.perf_counter()
        return loss_of_rows / num_rows(rows)

    def _train_step(self, batch: Batch, started_s: float) -> float:
        lr = float(self._run.lr_schedule.get_last_lr()[0])
        result = self._differentiate(batch)
        self._update()
        loss = float(result.loss)  # on an accelerator this waits until the step is done
        elapsed_s = time.perf_counter() - started_s
        timeline = self._run.model.gather_timeline(result)
        assert timeline is not None, "in training mode every step has one"
        self._record(batch.num_rows, elapsed_s, loss, lr, timeline)
        return loss

    def _differentiate(self, batch: Batch) -> StepResult:
        run = self._run
        batch = self._team.part(batch)
        run.optimizer.zero_grad()
        with _autocast(run):
            return run.model.step(
                batch.input, batch.target, run.loss.function, loss_reduction=run.loss.reduction
            )

    def _update(self) -> None:
        run = self._run
        if run.config.train.clip_grad_norm is not None:
            clip_grad_norm_(run.model, run.config.train.clip_grad_norm)
        run.optimizer.step()
        run.lr_schedule.step()

    def _record(
        self, rows: int, elapsed_s: float, loss: float, lr: float, timeline: Timeline
    ) -> None:
        model = self._run.model
        share = len(model.balance) // timeline.num_workers
        chunks = min(model.chunks, -(-rows // self._team.num_replicas))
        self.tally.add(rows, elapsed_s, timeline, chunks, share)
        self._write(
            "step",
            self.step + 1,
            self.epoch,
            loss=loss,
            rows=rows,
            rows_per_s=rows / elapsed_s,
            lr=lr,
            bubble=timeline.bubble,
            makespan_s=timeline.makespan_s,
        )
        self.step += 1  # last, so that an interrupted run names a step that was recorded

    def _write(self, kind: str, step: int, epoch: int, **numbers: float | None) -> None:
        if self._metrics is not None:  # one of several processes does it
            self._metrics.write(kind, step, epoch, **numbers)

    def _evaluate(self) -> Evaluation:
        run = self._run
        with _autocast(run):
            evaluation = evaluate(
                run.model, run.loss, run.splits.test, run.config.data.batch_size, self._team
            )
        self._write(
            "evaluation",
            self.step,
            self.epoch,
            test_loss=evaluation.loss,
            test_accuracy=evaluation.accuracy,
        )
        return evaluation


def _autocast(run: Run) -> torch.autocast:
    device = torch.device(run.model.devices[0])
    enabled = run.config.train.precision == "bf16"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)
