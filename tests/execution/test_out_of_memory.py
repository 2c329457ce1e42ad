"""A stage that has no memory left: who, where, how much, and what would help."""

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from gpipe import GPipe
from gpipe.execution.channel import Mailbox
from gpipe.stage.device import Device
from tests.members import over_all_ways, train_once

ROWS, WIDTH, CHUNKS = 8, 16, 4
BYTES = ROWS // CHUNKS * WIDTH * 4  # of one activation of one micro-batch


class Greedy(nn.Module):
    """Wants more than there is, once a number of micro-batches has gone through."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls < 3:
            return x * 2
        if self.how == "accelerator":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return torch.empty(2**60)


@pytest.mark.parametrize("how", ["accelerator", "host"])
@over_all_ways
def test_the_note_names_stage_microbatch_held_bytes_and_remedy(face, schedule, checkpoint, how):
    # The third call: each forward of the last stage is repeated at once under 1F1B.
    microbatch = 1 if (schedule, checkpoint) == ("1f1b", "always") else 2
    model = GPipe(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh(), Greedy(how)),
        [1, 3], CHUNKS, schedule=schedule, checkpoint=checkpoint,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="memory") as caught:
        train_once(model, face, torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), mse_loss)
    place, note = caught.value.__notes__
    where = f"micro-batch {microbatch}"
    assert place == f"gpipe: in stage 1, layer 3 ('3', Greedy), {where}, forward"
    assert note.startswith(f"gpipe: out of memory in stage 1 on cpu, {where}. It held ")
    assert note.endswith(
        "Raise chunks, choose checkpoint='always', or give the stage fewer layers in balance."
    )


def test_held_bytes_are_those_of_inputs_and_saved_activations():
    model = GPipe(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh(), Greedy("accelerator")),
        [1, 3], CHUNKS, schedule="fill_drain", checkpoint="never",
    )  # fmt: skip
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model.step(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), mse_loss)
    # Two micro-batches: the input (a copy in the first mini-batch, and the boundary itself), the
    # outputs of two Tanh, the difference's two operands.
    assert "It held 2 micro-batches with 1.5 KiB." in caught.value.__notes__[1]


class Checkpointed(nn.Module):
    """Recomputes its inside by itself, and counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.count, x, use_reentrant=False)

    def count(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.inside(x).tanh()


# Reading what torch has saved unpacks it: the layer ran six times more to count its bytes.
def test_counting_bytes_runs_no_layer_again():
    layer = Checkpointed()
    model = GPipe(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, Greedy("accelerator")), [1, 2], CHUNKS,
        schedule="fill_drain", checkpoint="never",
    )  # fmt: skip
    with pytest.raises(torch.OutOfMemoryError):
        model.step(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), mse_loss)
    assert layer.num_calls == 3


def test_the_note_never_takes_the_place_of_the_error(monkeypatch):
    def refuse(_: object) -> None:
        raise RuntimeError("the device does not say")

    monkeypatch.setattr(Device, "memory", refuse)
    model = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Greedy("accelerator")), [1, 1], CHUNKS)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model.step(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), mse_loss)
    assert len(caught.value.__notes__) == 1


def test_what_is_sent_takes_memory_where_it_arrives(monkeypatch):
    def full(self: Mailbox, microbatch: int, payload: object) -> None:
        raise torch.OutOfMemoryError("no memory for a copy")

    model = GPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), [1, 1], CHUNKS)
    x = torch.randn(ROWS, WIDTH)
    monkeypatch.setattr(Mailbox, "put", lambda self, *both: _put_or(full, self, *both))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model.step(x, x, mse_loss)
    place, note = caught.value.__notes__
    assert place == (
        "gpipe: in stage 0, layer 0 ('0', Linear), micro-batch 0, sending the result of its forward"
    )
    assert note.startswith("gpipe: out of memory in stage 1 on cpu, micro-batch 0.")


def _put_or(full, mailbox: Mailbox, microbatch: int, payload: object) -> None:
    """What the caller puts in is taken; what a worker sends is not."""
    if threading.current_thread().name.startswith("gpipe-worker"):
        full(mailbox, microbatch, payload)
    mailbox._put((microbatch, payload))


def test_other_errors_get_no_such_note():
    model = GPipe(nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4)), [1, 1])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model(torch.randn(2, 3))
    assert len(caught.value.__notes__) == 1
