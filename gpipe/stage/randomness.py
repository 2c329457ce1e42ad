"""Randomness as a function of key, micro-batch and layer."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import Any

import torch

__all__ = ["GeneratorChangedError", "Randomness", "holding_generator"]

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


class Randomness:
    """Gives each layer random numbers of its own for each micro-batch of one mini-batch.

    Before a layer runs, the default generator is seeded from (key, micro-batch, layer); afterwards
    it is put back. So neither threads nor stages nor the order of actions have a say, and a
    recompute draws what its forward drew. The key is the next number of the caller's generator. If
    no layer draws, the caller never notices that it was looked at.
    """

    def __init__(self) -> None:
        self._key: int | None = None
        self._state_after_key: torch.Tensor | None = None
        self._drawn = False
        self._paid = False

    def run(
        self, layer: Callable[[Any], Any], value: Any, microbatch: int, index: int
    ) -> tuple[Any, bool]:
        """Call a layer that may draw.

        Args:
            layer: What is called.
            value: With what.
            microbatch: The index of the micro-batch.
            index: That of the layer in the whole model.

        Returns:
            What the layer gave, and whether it drew, or looked at the generator so as to replay it.
        """
        generator = torch.default_generator
        with holding_generator():
            state = generator.get_state()
            generator.manual_seed(_mixed(self._key_from(state), microbatch, index))
            seeded = generator.get_state()
            try:
                with _watched() as watch:
                    result = layer(value)
                drew = not torch.equal(generator.get_state(), seeded)
            finally:
                generator.set_state(state)
            self._drawn = self._drawn or drew
        return result, drew or watch.read

    def _key_from(self, state: torch.Tensor) -> int:
        if self._key is None:
            ahead = torch.Generator()
            ahead.set_state(state)
            self._key = int(torch.randint(2**62, (), generator=ahead, device="cpu"))
            self._state_after_key = ahead.get_state()
        return self._key

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """See to the caller's generator: it moves on by the key if a layer drew, and else stays.

        Raises:
            GeneratorChangedError: Something else drew from it meanwhile; it is put back.
        """
        with holding_generator():
            before, payments = torch.get_rng_state(), _payments.count
        try:
            yield
        finally:
            with holding_generator():
                # Another model may have moved it in good order meanwhile, from another thread.
                alone = payments == _payments.count
                moved = alone and not torch.equal(torch.get_rng_state(), before)
                if moved:
                    torch.set_rng_state(before)
        if moved:
            raise GeneratorChangedError
        self._pay()

    def _pay(self) -> None:
        """Move the caller's generator on by the key, once."""
        if self._drawn and not self._paid:
            assert self._state_after_key is not None
            with holding_generator():
                torch.set_rng_state(self._state_after_key)
                _payments.count += 1
            self._paid = True


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


def _mixed(key: int, microbatch: int, index: int) -> int:
    """A seed in which every bit of the three has a say (the finaliser of SplitMix64)."""
    seed = key
    for number in (microbatch, index):
        seed = (seed + 0x9E3779B97F4A7C15 * (number + 1)) % 2**64
        seed = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        seed = (seed ^ seed >> 27) * 0x94D049BB133111EB % 2**64
        seed ^= seed >> 31
    return seed % 2**63
