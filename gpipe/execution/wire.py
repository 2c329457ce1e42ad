"""Carries payloads between a stage of this process and one of another process."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pickle import PicklingError
from typing import Any, NamedTuple

from gpipe.execution import parcel
from gpipe.execution.channel import Mailbox
from gpipe.execution.peer import Peer, Posted, wait_for
from gpipe.stage.boundary import Payload
from gpipe.stage.device import Device
from gpipe.stage.form import Form, Spec

__all__ = ["Awaited", "Forms", "Waiting", "Wire"]

_NUM_UNANSWERED = 2  # sends that nothing answers, before the oldest is waited for

_ONE_BY_ONE: Mapping[int, Sequence[int]] = {}

Forms = MutableMapping[tuple[int, int], Form]
"""How each payload of a mini-batch looks, by line and micro-batch; both ends know the same."""


Waiting = Callable[[str], AbstractContextManager[None]]


class Awaited(Mailbox):
    """A route from another process: what is put in is a function that waits for the payload."""

    def take(self, microbatch: int) -> Any:
        """Wait until the payload of this micro-batch is there."""
        return super().take(microbatch)()


class Wire(NamedTuple):
    """One end of the way from a stage to another, in one mini-batch.

    Several payloads may go along: a boundary, and skips beside it. Each has a line of its own.

    Attributes:
        name: What is said to be waited for, without its micro-batch, such as "A0>1".
        peer: The worker at the other end.
        device: That of the stage which is here.
        lines: Where the payloads are taken from, or put into, by the number of the line.
        num_microbatches: Of the mini-batch.
        forms: What is known of the payloads.
        waiting: Around each wait, called with what is waited for.
        sent: What is on its way from here, by micro-batch.
        together: Which receives are posted at that of a micro-batch, if not just its own.
        landed: Called when all that came of a micro-batch has been waited for.
    """

    name: str
    peer: Peer
    device: Device
    lines: Sequence[tuple[int, Mailbox]]
    num_microbatches: int
    forms: Forms
    waiting: Waiting
    sent: dict[int, list[Posted]]
    together: Mapping[int, Sequence[int]] = _ONE_BY_ONE
    landed: Callable[[], None] | None = None

    def knows_all_forms(self) -> bool:
        """Whether no payload has to be told how it looks."""
        return all(
            (line, microbatch) in self.forms
            for line, _ in self.lines
            for microbatch in range(self.num_microbatches)
        )

    def send(self, microbatch: int) -> None:
        """Start to send what the stage has left in the mailboxes."""
        self.sent[microbatch] = [
            posted
            for line, mailbox in self.lines
            for posted in self._send(line, microbatch, mailbox.take(microbatch))
        ]

    def send_unanswered(self, microbatch: int) -> None:
        """The same where `release` is never called: older sends are let go here."""
        self.send(microbatch)
        if len(self.sent) > _NUM_UNANSWERED:
            self.release(next(iter(self.sent)))

    def release(self, microbatch: int) -> None:
        """Wait until what was sent has left, and let it go."""
        wait_for(self.sent.pop(microbatch, ()))

    def finish(self) -> None:
        """Release all that is left."""
        for microbatch in list(self.sent):
            self.release(microbatch)

    def receive(self, microbatch: int, answers: "Wire | None" = None) -> None:
        """Post the receives, and put into the mailboxes what waits for them.

        Args:
            microbatch: Of which micro-batch.
            answers: The wire that has sent what this is the answer to.
        """
        for each in self.together.get(microbatch, (microbatch,)):
            landed = _after_calls(len(self.lines), partial(self._landed, each, answers))
            for line, mailbox in self.lines:
                mailbox.put(each, self._awaited(line, each, landed))

    def _send(self, line: int, microbatch: int, payload: Payload) -> list[Posted]:
        tag = self._tag(line, microbatch)
        form = self.forms.get((line, microbatch))
        posted: list[Posted] = []
        if form is None:
            form, posted = self._send_form(payload, tag + 1)
            self._keep(form, line, microbatch)
        elif not form.describes(payload, self.device):
            raise self._changed(microbatch, form, Form.of(payload, self.device))
        return [*posted, *parcel.send_tensors(form, payload, self.peer, tag)]

    def _awaited(
        self, line: int, microbatch: int, landed: Callable[[], None]
    ) -> Callable[[], Payload]:
        tag = self._tag(line, microbatch)
        form = self.forms.get((line, microbatch))
        if form is None:
            with self.waiting(f"{self.name}.{microbatch}"):
                form = parcel.receive_form(self.peer, tag + 1)
            self._keep(form, line, microbatch)
        bound = parcel.Bound(form, self.peer, self.device, tag)
        return partial(self._wait, microbatch, bound, landed)

    def _wait(self, microbatch: int, bound: parcel.Bound, landed: Callable[[], None]) -> Payload:
        with self.waiting(f"{self.name}.{microbatch}"):
            payload = bound.wait()
        landed()
        return payload

    def _landed(self, microbatch: int, answers: "Wire | None") -> None:
        if self.landed is not None:
            self.landed()
        if answers is not None:
            answers.release(microbatch)

    def _tag(self, line: int, microbatch: int) -> int:
        # gloo takes messages by tag; the odd ones are for forms.
        return 2 * (line * self.num_microbatches + microbatch)

    def _keep(self, form: Form, line: int, microbatch: int) -> None:
        if form.is_lasting:
            self.forms[line, microbatch] = form

    def _send_form(self, payload: Payload, tag: int) -> tuple[Form, list[Posted]]:
        try:
            return parcel.send_form(Form.of(payload, self.device), self.peer, tag)
        except (TypeError, AttributeError, PicklingError) as error:
            error.add_note(
                f"gpipe: {self.name} goes to another process, so all in it that is no tensor must "
                "be something that pickle can carry. Pass it in another way, or make it so."
            )
            raise

    def _changed(self, microbatch: int, known: Form, form: Form) -> ValueError:
        return ValueError(
            f"What {self.name}.{microbatch} carries was {_told(known)} in an earlier mini-batch "
            f"whose input looked the same, and is {_told(form)} now. Where that is meant, make "
            "the GPipe with dynamic_shapes=True."
        )


def _after_calls(num_calls: int, function: Callable[[], None]) -> Callable[[], None]:
    """What calls the function when it is called for the last of so many times."""
    if num_calls == 1:
        return function
    left = num_calls

    def called() -> None:
        nonlocal left
        left -= 1
        if not left:
            function()

    return called


def _told(form: Form) -> str:
    specs = ["no gradient" if spec is None else _told_of(spec) for spec in form.specs]
    structure = "" if form.structure is None else f" in {form.structure}"
    return f"[{', '.join(specs)}]{structure}"


def _told_of(spec: Spec) -> str:
    asks = "that requires grad" if spec.requires_grad else "without grad"
    return f"{spec.dtype} {spec.shape} with strides {spec.strides} {asks}"
