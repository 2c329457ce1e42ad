"""Randomness as a function of key, micro-batch and layer."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipe.stage.device import HOST, Device, device_of

__all__ = ["GeneratorChangedError", "Randomness", "holding_generator", "key_ahead"]

_lock: ContextVar[RLock] = ContextVar("gpipe_generator_lock")


class _ProcessLock:
    """The outermost lock; a forked child gets a new one, whose owner exists there."""

    def __init__(self) -> None:
        self.lock = RLock()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.lock = RLock()


_process = _ProcessLock()


@contextmanager
def holding_generator() -> Iterator[None]:
    """Keep torch's default generator to oneself: all CPU threads of a process share it.

    The holder may run another pipeline, whose workers then share the generator among themselves:
    by way of their context they find a lock of their own.
    """
    with _lock.get(_process.lock):
        token = _lock.set(RLock())
        try:
            yield
        finally:
            _lock.reset(token)


class _Payments:
    """How often a mini-batch has moved the caller's generator on, in this process."""

    count = 0


_payments = _Payments()


class GeneratorChangedError(Exception):
    """The caller's generator is not as it was: something drew from it that was not known to."""


class Called(NamedTuple):
    """What came of calling a layer.

    Attributes:
        result: What it gave.
        drew: Whether it drew random numbers.
        looked: Whether it looked at a generator's state, as one does to put it back in a backward.
    """

    result: Any
    drew: bool
    looked: bool


class Randomness:
    """Gives each layer random numbers of its own for each micro-batch of one mini-batch.

    Before a layer runs, the default generators of the host and of its device are seeded from (key,
    micro-batch, layer); afterwards they are put back. So neither threads nor stages nor the order
    of actions have a say, and a recompute draws what its forward drew. The key is the next number
    of the caller's generator on the host. If no layer draws, the caller never notices that it was
    looked at.

    Args:
        devices: Those of the stages.
        key: The key and the number of the replica, where another process has told it. The
            caller's generator moves on as if it had come from there.
    """

    def __init__(self, devices: Iterable[Device] = (), key: tuple[int, int] | None = None) -> None:
        host = device_of(HOST)
        every = (generator for device in devices for generator in device.generators)
        self._generators = tuple(dict.fromkeys((host, *every)))
        self._key = None if key is None else _of_replica(*key)
        self._state_after_key: Tensor | None = None
        self.drawn = False
        self._paid = False

    def run(
        self,
        layer: Callable[[Any], Any],
        value: Any,
        microbatch: int,
        index: int,
        device: Device,
    ) -> Called:
        """Call a layer that may draw.

        Args:
            layer: What is called.
            value: With what.
            microbatch: The index of the micro-batch.
            index: That of the layer in the whole model.
            device: Where it computes.
        """
        with holding_generator():
            generators = device.generators
            before = _states(generators)
            seed = _mixed(self._drawn_key(), microbatch, index)
            seeded = [generator.seeded_state(seed) for generator in generators]
            _put(generators, seeded)
            try:
                with _watched() as watch:
                    result = layer(value)
                drew = _differ(_states(generators), seeded)
            finally:
                _put(generators, before)
            self.drawn = self.drawn or drew
        return Called(result, drew, watch.read)

    def _drawn_key(self) -> int:
        if self._key is None:
            self._key, self._state_after_key = _ahead()
        return self._key

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """See to it that the caller's generators stay as they are.

        Raises:
            GeneratorChangedError: Something else drew from one meanwhile; all are put back.
        """
        with holding_generator():
            before, payments = _states(self._generators), _payments.count
        try:
            yield
        finally:
            with holding_generator():
                # Another model may have moved it in good order meanwhile, from another thread.
                alone = payments == _payments.count
                moved = alone and _differ(_states(self._generators), before)
                if moved:
                    _put(self._generators, before)
        if moved:
            raise GeneratorChangedError

    def pay(self) -> None:
        """Move the caller's generator on by the key, once, if a layer drew."""
        if self.drawn and not self._paid:
            with holding_generator():
                after = self._state_after_key
                torch.set_rng_state(_ahead()[1] if after is None else after)
                _payments.count += 1
            self._paid = True


def key_ahead() -> int:
    """The key that the caller's generator would give next; it stays as it is."""
    with holding_generator():
        return _ahead()[0]


def _ahead() -> tuple[int, Tensor]:
    """The next key of the caller's generator on the host, and its state behind it."""
    ahead = torch.Generator(HOST)
    ahead.set_state(device_of(HOST).random_state())
    return int(torch.randint(2**62, (), generator=ahead, device=HOST)), ahead.get_state()


def _of_replica(key: int, replica: int) -> int:
    """Replicas have other examples, so they draw other numbers; the first those of one process."""
    return key if replica == 0 else _mixed(key, replica, replica)


class _Watch:
    """Stands for the default generator in `torch.random`, and sees whether its state is read.

    `torch.utils.checkpoint` reads the state in forward and sets it in backward, when the layer is
    long past: a layer that does so must hold the lock in its backward, even if it never draws.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.read = False
        self._generator = generator

    def get_state(self) -> torch.Tensor:
        self.read = True
        return self._generator.get_state()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


@contextmanager
def _watched() -> Iterator[_Watch]:
    module: Any = torch.random
    generator = module.default_generator
    watch = module.default_generator = _Watch(generator)
    try:
        yield watch
    finally:
        module.default_generator = generator


def _states(generators: Sequence[Device]) -> list[Tensor]:
    return [generator.random_state() for generator in generators]


def _put(generators: Sequence[Device], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_random_state(state)


def _differ(states: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    # torch.equal takes ten times as long; all states are bytes on the host.
    return any(
        mine.numpy().tobytes() != other.numpy().tobytes()
        for mine, other in zip(states, others, strict=True)
    )


def _mixed(key: int, microbatch: int, index: int) -> int:
    """A seed in which every bit of the three has a say (the finaliser of SplitMix64)."""
    seed = key
    for number in (microbatch, index):
        seed = (seed + 0x9E3779B97F4A7C15 * (number + 1)) % 2**64
        seed = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        seed = (seed ^ seed >> 27) * 0x94D049BB133111EB % 2**64
        seed ^= seed >> 31
    return seed % 2**63
