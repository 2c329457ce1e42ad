"""What to expect of a run, and what came of it."""

from gpipe.timeline import ideal_bubble
from gpipe.train.build import Run
from gpipe.train.evaluation import Evaluation
from gpipe.train.sample import rows_per_minibatch
from gpipe.train.tally import Tally
from gpipe.train.terminal import warn

__all__ = ["summary", "warn_of_bubble"]


def warn_of_bubble(run: Run) -> None:
    """Says how long stages will wait where there are fewer micro-batches than workers."""
    num_stages, num_microbatches = run.model.num_workers, _num_microbatches(run)
    if num_microbatches >= num_stages:
        return
    bubble, better = (ideal_bubble(num_stages, m) for m in (num_microbatches, 4 * num_stages))
    warn(
        f"expect a bubble of {bubble:.0%}: a mini-batch makes {num_microbatches} micro-batch(es)"
        f" for {num_stages} stages, so most stages wait most of the time."
        f" With pipeline.chunks={4 * num_stages} and as many rows it is {better:.0%}."
    )


def summary(run: Run, evaluation: Evaluation, tally: Tally) -> str:
    """The final line: how good, how fast, and the bubble beside the formula's.

    Where mini-batches differ in size the formula's is the mean over them, too.
    """
    return (
        f"{evaluation}, {tally.rows_per_s:,.0f} rows/s, bubble {tally.bubble:.1%} measured,"
        f" {tally.ideal_bubble:.1%} by the formula {_formula(run)}"
    )


def _formula(run: Run) -> str:
    num_workers, num_microbatches = run.model.num_workers, _num_microbatches(run)
    share = len(run.model.balance) // num_workers
    sizes = f"K={num_workers}, M={num_microbatches}"
    if share == 1:
        return f"(K-1)/(M+K-1) with {sizes}"
    return f"(K-1)/(v M+K-1) with {sizes}, v={share}"


def _num_microbatches(run: Run) -> int:
    """Of a replica's part of a whole mini-batch: never more than it has rows."""
    return min(run.config.pipeline.chunks, rows_per_minibatch(run.config, run.splits))
