"""BatchNorm whose running statistics are those of the mini-batch."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from gpipe.stage.moments import Moments, merged, moments_of, require_variance

__all__ = [
    "Collector",
    "DeferredBatchNorm",
    "DeferredBatchNorm1d",
    "DeferredBatchNorm2d",
    "DeferredBatchNorm3d",
    "defer_batch_norm",
]


Share = Callable[[list[Moments]], list[list[Moments]]]
"""Gives the moments of each replica for those of this one."""


class DeferredBatchNorm(_BatchNorm):
    """Normalises with the micro-batch and leaves the running statistics to a `Collector`.

    That is so while a collector observes or replays it in training. Otherwise, and where it tracks
    no statistics, it is torch's. It has no state of its own: a module becomes one by its class.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Torch's BatchNorm, except that a micro-batch may have one value per channel."""
        observation = _observation.get() or _replay_of(self)
        if observation is None or not observation.collector.concerns(self):
            return super().forward(input)
        return _normalised(self, input, observation)


class DeferredBatchNorm1d(DeferredBatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d`, deferred."""


class DeferredBatchNorm2d(DeferredBatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d`, deferred."""


class DeferredBatchNorm3d(DeferredBatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d`, deferred."""


_DEFERRED: dict[type[nn.Module], type[DeferredBatchNorm]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}


def defer_batch_norm(layers: Iterable[nn.Module]) -> list[DeferredBatchNorm]:
    """Turn each BatchNorm in the layers, however deep, into a deferred one, in place.

    Only its class changes: parameters, buffers, hooks, names and references to it stay.

    Args:
        layers: The layers; when one is refused, none has changed.

    Returns:
        Each deferred norm once, those included that were deferred before.

    Raises:
        ValueError: A norm computes in a way that cannot be deferred: a SyncBatchNorm, a lazy one,
            or one with a forward of its own, which would take in every micro-batch unnoticed.
    """
    norms: dict[DeferredBatchNorm, None] = {}
    for norm in list(_batch_norms(layers)):
        norm.__class__ = _DEFERRED.get(type(norm), type(norm))
        assert isinstance(norm, DeferredBatchNorm)
        norms[norm] = None
    return list(norms)


class Collector:
    """Takes in the moments of one mini-batch; commits them to the running statistics at its end.

    Whoever drives the mini-batch says when it is over: a norm cannot know. Until then nothing has
    changed, so a mini-batch that fails needs no repair.

    Args:
        norms: Those that it concerns; others it lets be.
    """

    def __init__(self, norms: Iterable[DeferredBatchNorm]) -> None:
        # For each norm and micro-batch the moments of each use, in order of use. A micro-batch is
        # in one stage at a time, so no two threads ever append to the same list.
        self._moments: dict[DeferredBatchNorm, dict[int, list[Moments]]] = {
            norm: {} for norm in norms
        }

    @contextmanager
    def observing(self, microbatch: int) -> Iterator[None]:
        """Take in what the norms see in this thread meanwhile, in a forward of this micro-batch."""
        with _observed(_Observation(self, microbatch)):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Let the norms do the same as when they were observed, without taking it in again.

        For a recompute, and for a backward, in which a layer may do its own checkpointing: on an
        accelerator in a thread of autograd's, which knows nothing of this one.
        """
        with _observed(_Observation(self, None)), _replays.holding(self):
            yield

    def concerns(self, norm: DeferredBatchNorm) -> bool:
        """Whether this norm's statistics are to be deferred, as it is now."""
        tracks = norm.running_mean is not None and norm.running_var is not None
        return norm.training and norm.track_running_stats and tracks and norm in self._moments

    def add(self, norm: DeferredBatchNorm, microbatch: int, moments: Moments) -> None:
        """Take in the next use of a norm in a micro-batch."""
        self._moments[norm].setdefault(microbatch, []).append(moments)

    def tensors(self) -> Iterator[Tensor]:
        """Those that were taken in, wherever they live."""
        for by_microbatch in self._moments.values():
            for moments in chain.from_iterable(by_microbatch.values()):
                yield from (moments.mean, moments.deviations)

    def check(self) -> None:
        """Raise what `commit` would: for a driver that commits after it can no longer turn back.

        Raises:
            ValueError: A norm has seen one value per channel in the whole mini-batch; torch's own
                error.
        """
        for _, parts in self._uses():
            require_variance(parts)

    @torch.no_grad()
    def commit(self, share: Share | None = None) -> None:
        """Update the running statistics, once for each use, as the un-split mini-batch would.

        The moments are merged in the order of the micro-batches, whenever they came, and are then
        forgotten. On an accelerator's current stream, which has to wait for the forwards first.

        Args:
            share: Brings the moments of all replicas together.

        Raises:
            ValueError: As `check`; no norm has changed then.
        """
        if share is None:
            self.check()
        norms, uses = [], []
        for norm, parts in self._uses():
            norms.append(norm)
            uses.append(merged(parts))
        if share is not None:
            uses = [merged(parts) for parts in zip(*share(uses), strict=True)]
        for norm, moments in zip(norms, uses, strict=True):
            _update(norm, moments)
        for by_microbatch in self._moments.values():
            by_microbatch.clear()

    def _uses(self) -> Iterator[tuple[DeferredBatchNorm, list[Moments]]]:
        """Each use of each norm, with the moments of its micro-batches in their order."""
        for norm, by_microbatch in self._moments.items():
            in_order = [by_microbatch[microbatch] for microbatch in sorted(by_microbatch)]
            for use in range(max(map(len, in_order), default=0)):
                yield norm, [uses[use] for uses in in_order if use < len(uses)]


class _Observation(NamedTuple):
    """Under whose eyes a thread runs."""

    collector: Collector
    microbatch: int | None
    """None while it is replayed."""


class _Replays:
    """The collectors that replay now, in whatever thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[Collector] = Counter()

    @contextmanager
    def holding(self, collector: Collector) -> Iterator[None]:
        """Count this one meanwhile."""
        with self._lock:
            self._counts[collector] += 1
        try:
            yield
        finally:
            with self._lock:
                self._counts[collector] -= 1
                self._counts += Counter()  # without those that are back at 0

    def of(self, norm: DeferredBatchNorm) -> Collector | None:
        """The one that concerns this norm."""
        with self._lock:
            return next((each for each in self._counts if each.concerns(norm)), None)


_replays = _Replays()


def _replay_of(norm: DeferredBatchNorm) -> _Observation | None:
    collector = _replays.of(norm)
    return None if collector is None else _Observation(collector, None)


_observation: ContextVar[_Observation | None] = ContextVar("gpipe_observation", default=None)


@contextmanager
def _observed(observation: _Observation) -> Iterator[None]:
    token = _observation.set(observation)
    try:
        yield
    finally:
        _observation.reset(token)


def _batch_norms(layers: Iterable[nn.Module]) -> Iterator[_BatchNorm]:
    """Each BatchNorm in the layers; an error for one that cannot be deferred."""
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if isinstance(module, _BatchNorm):
                place = f"{name!r} in layer {index}" if name else f"Layer {index}"
                _require_deferrable(module, place)
                yield module


def _require_deferrable(norm: _BatchNorm, place: str) -> None:
    # A forward that hangs on the module itself goes before that of any class.
    is_plain = type(norm) in _DEFERRED and "forward" not in vars(norm)
    if not is_plain and not isinstance(norm, DeferredBatchNorm):
        raise ValueError(
            f"{place} is of type {type(norm).__name__}, which deferred_batch_norm cannot defer: "
            f"{_obstacle(norm)}; or leave out deferred_batch_norm."
        )


def _obstacle(norm: _BatchNorm) -> str:
    if isinstance(norm, nn.SyncBatchNorm):
        return (
            "it talks to other processes in every forward, and micro-batches come in no common "
            "order. Use nn.BatchNorm1d, 2d or 3d instead"
        )
    if isinstance(norm, LazyModuleMixin):
        return (
            "it becomes another class in its first forward. Run that first, or use "
            "nn.BatchNorm1d, 2d or 3d with its number of features"
        )
    return (
        "it has a forward of its own, which would update the running statistics in every "
        "micro-batch. Use nn.BatchNorm1d, 2d or 3d itself, or derive its class from "
        "gpipe.stage.batchnorm.DeferredBatchNorm1d, 2d or 3d and call super().forward"
    )


def _normalised(norm: DeferredBatchNorm, input: Tensor, observation: _Observation) -> Tensor:
    norm._check_input_dim(input)  # type: ignore[no-untyped-call]
    if norm.eps <= 0:
        raise ValueError(f"eps of a BatchNorm is {norm.eps}. Training needs a positive one.")
    assert norm.running_mean is not None
    assert norm.running_var is not None
    # With a momentum of 1 the kernel leaves the statistics, which it computes anyway, in buffers of
    # ours: the same kernel as with the module's own. (`functional.batch_norm` would refuse one
    # value per channel.) The graph keeps these two, so nothing may write into them later.
    mean, variance = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_var)
    cudnn_enabled = torch.backends.cudnn.enabled
    output = torch.batch_norm(
        input, norm.weight, norm.bias, mean, variance, True, 1.0, norm.eps, cudnn_enabled
    )
    if observation.microbatch is not None:
        moments = moments_of(input.detach(), mean, variance)
        observation.collector.add(norm, observation.microbatch, moments)
    return output


def _update(norm: DeferredBatchNorm, moments: Moments) -> None:
    """Do what torch's forward does to the buffers."""
    factor = norm.momentum or 0.0
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            factor = 1.0 / float(norm.num_batches_tracked)
    if moments.num_values > 0:
        _average(norm.running_mean, moments.mean, factor)
        _average(norm.running_var, moments.deviations / (moments.num_values - 1), factor)


def _average(running: Tensor | None, batch: Tensor, factor: float) -> None:
    assert running is not None
    # In the precision of the moments, rounded once: in place a half would round twice.
    running.copy_(factor * batch + (1 - factor) * running.to(batch.dtype))
