"""The control word, which all workers exchange ahead of a mini-batch."""

import pickle
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from gpipe.execution.caller import autocast_dtypes
from gpipe.execution.exchange import Exchange
from gpipe.execution.facts import Size
from gpipe.execution.wire import Forms
from gpipe.stage.boundary import start_of
from gpipe.stage.microbatch import Batch

__all__ = ["Word", "Words"]

_NUM_KNOWN = 128  # ways in which boundaries look that are remembered


class Word(NamedTuple):
    """What every worker has to know of a mini-batch before it begins.

    Attributes:
        look: A number for how the input looks; the same for inputs that look the same.
        rows: Those of this replica.
        total_rows: Those of all replicas.
        num_microbatches: Into how many the former are cut.
        trains: Whether there will be gradients.
        key: What random numbers are made of.
        states: A number for each worker that changes when its layers are frozen, cast and the like.
    """

    look: int
    rows: int
    total_rows: int
    num_microbatches: int
    trains: int
    key: int
    states: tuple[int, ...]

    @property
    def size(self) -> Size:
        """What the caller has to know of it."""
        return Size(self.rows, self.total_rows, self.num_microbatches, bool(self.trains))

    def tell(self, exchange: Exchange) -> None:
        """Let all workers know what this one does, its own state only; every worker calls it."""
        exchange.tell([*self[:-1], *self.states])

    @classmethod
    def heard(cls, first: int, exchange: Exchange) -> "Word":
        """That of the first worker, with the states of all; every worker calls it.

        Args:
            first: The worker that has the first stage.
            exchange: Between the workers, which all have told theirs.

        Raises:
            RuntimeError: Some of them train and others do not; all raise it.
            ValueError: The targets have another number of rows than the input; all raise it.
        """
        rows: list[Any] = exchange.hear()
        words = [cls._make((*known, (state,))) for *known, state in rows]
        word = words[first]._replace(states=tuple([row[-1] for row in rows]))
        _require_same(words, word)
        return word


class Words:
    """The looks of inputs that were met, and how boundaries then look.

    The first worker gives out numbers; the others see them only. All forget alike.

    Args:
        is_dynamic: Whether nothing is to be remembered.
    """

    def __init__(self, is_dynamic: bool) -> None:
        self._is_dynamic = is_dynamic
        self._next = 0
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()
        self._forms: OrderedDict[tuple[Any, ...], Forms] = OrderedDict()

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
        use = word.look, word.trains, word.num_microbatches, word.states
        forms = self._forms.pop(use, {})
        if not self._is_dynamic:
            self._forms[use] = forms
        if len(self._forms) > _NUM_KNOWN:  # on all workers the same, which have the same words
            self._forms.popitem(last=False)
        return forms


def _require_same(words: Sequence[Word], first: Word) -> None:
    for worker, word in enumerate(words):
        if word.trains != first.trains:
            modes = {1: "trains", 0: "does not train"}
            raise RuntimeError(
                f"Worker {worker} {modes[word.trains]} and the first one {modes[first.trains]}. "
                "Call train() or eval() on all ranks alike, and the model under the same grad mode."
            )
        if word.rows not in (0, first.rows):  # 0: it has neither input nor target
            raise ValueError(
                f"The target on worker {worker} has {word.rows} rows and the input has "
                f"{first.rows}. Pass both of the same mini-batch."
            )


def _look(batch: Batch) -> Hashable | None:
    """All that may tell the shapes of boundaries; None where that cannot be written down."""
    tensors, structure = batch.boundary
    # Where a tensor starts tells where a stage's output starts that is a view of it.
    specs = [
        (each.shape, each.stride(), start_of(each), each.dtype, each.requires_grad)
        for each in tensors
    ]
    look = tuple(specs), tuple(batch.dims), tuple(autocast_dtypes().items())
    try:
        return look if structure is None else (look, pickle.dumps(structure))
    except Exception:  # noqa: BLE001 - whatever an object of the user's raises
        return None
