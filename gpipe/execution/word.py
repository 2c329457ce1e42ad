"""The control word, which travels down the pipe ahead of a mini-batch."""

import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipe.execution.engine import Size
from gpipe.execution.wire import Forms
from gpipe.stage.boundary import start_of
from gpipe.stage.microbatch import Batch

__all__ = ["Word", "Words"]

_NUM_KNOWN = 256  # inputs of different looks whose boundaries are remembered


class Word(NamedTuple):
    """What every worker has to know of a mini-batch before it begins.

    Attributes:
        look: A number for how the input looks; the same for inputs that look the same.
        rows: Those of this replica.
        total_rows: Those of all replicas.
        num_microbatches: Into how many the former are cut.
        trains: Whether there will be gradients.
        key: What random numbers are made of.
    """

    look: int
    rows: int
    total_rows: int
    num_microbatches: int
    trains: int
    key: int

    @property
    def size(self) -> Size:
        """What the caller has to know of it."""
        return Size(self.rows, self.total_rows, self.num_microbatches, bool(self.trains))

    @classmethod
    def empty_line(cls) -> Tensor:
        """Memory to receive one in."""
        return torch.empty(len(cls._fields), dtype=torch.int64)

    @classmethod
    def of_line(cls, line: Tensor) -> "Word":
        """The one that was received."""
        return cls(*line.tolist())

    def line(self) -> Tensor:
        """The word as it is sent."""
        return torch.tensor(self, dtype=torch.int64)


class Words:
    """The looks of inputs that were met, and how boundaries then look.

    The first worker gives out numbers; the others see them only. All forget alike.

    Args:
        is_dynamic: Whether nothing is to be remembered.
    """

    def __init__(self, is_dynamic: bool) -> None:
        self._is_dynamic = is_dynamic
        self._next = 0
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._forms: OrderedDict[int, dict[Any, Forms]] = OrderedDict()

    def look_of(self, batch: Batch) -> int:
        """The number of how this input looks; only the first worker asks."""
        look = None if self._is_dynamic else _look(batch)
        if look is not None and look in self._numbers:
            return self._numbers[look]
        number, self._next = self._next, self._next + 1
        if look is not None:
            self._numbers[look] = number
            if len(self._numbers) > _NUM_KNOWN:
                self._numbers.popitem(last=False)
        return number

    def forms(self, word: Word) -> Forms:
        """How the payloads of this mini-batch look, as far as that is known."""
        by_use = self._forms.setdefault(word.look, {})
        for number in [each for each in self._forms if each <= word.look - 2 * _NUM_KNOWN]:
            del self._forms[number]
        return by_use.setdefault((word.trains, word.num_microbatches), {})


def _look(batch: Batch) -> bytes | None:
    """All that may tell the shapes of boundaries; None where that cannot be written down."""
    tensors, structure = batch.boundary
    # Where a tensor starts tells where a stage's output starts that is a view of it.
    specs = [
        (each.shape, each.stride(), start_of(each), each.dtype, each.requires_grad)
        for each in tensors
    ]
    autocast = [
        (device, torch.get_autocast_dtype(device))
        for device in torch._C._autocast_supported_devices()
        if torch.is_autocast_enabled(device)
    ]
    try:
        return pickle.dumps((specs, structure, batch.dims, autocast))
    except Exception:  # noqa: BLE001 - whatever an object of the user's raises
        return None
