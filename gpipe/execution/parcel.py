"""A payload that goes to another worker together with what it looks like."""

from gpipe.execution.peer import Peer, Posted
from gpipe.stage.boundary import Boundary, Gradients, Payload
from gpipe.stage.device import HOST, Device
from gpipe.stage.form import Form, Landing, Spec, packed

__all__ = ["Bound", "receive", "receive_form", "send", "send_form", "send_tensors"]


class Bound:
    """A payload whose receives are posted.

    Args:
        form: How it looks.
        peer: Who sends it.
        device: Where it is to live.
        tag: That of its messages.
    """

    def __init__(self, form: Form, peer: Peer, device: Device, tag: int) -> None:
        self._form = form
        self._landings = [
            None if spec is None else _landing(spec, start, device)
            for spec, start in zip(form.specs, form.starts, strict=True)
        ]
        self._posted = [
            peer.receive(landing.line, tag, on_host=landing.spec.is_on_host)
            for landing in self._landings
            if landing is not None and landing.line.numel()
        ]

    def wait(self) -> Payload:
        """Wait until all of it is there."""
        for posted in self._posted:
            posted.wait()
        tensors: Gradients = [
            None if landing is None else landing.tensor() for landing in self._landings
        ]
        return self._form.filled(tensors)


def send_form(form: Form, peer: Peer, tag: int) -> list[Posted]:
    """Start to tell how a payload looks."""
    return peer.send_bytes(form.to_bytes(), tag)


def receive_form(peer: Peer, tag: int) -> Form:
    """Wait until that is known."""
    return Form.of_bytes(peer.receive_bytes(tag))


def send_tensors(form: Form, payload: Payload, peer: Peer, tag: int) -> list[Posted]:
    """Start to send the tensors of a payload."""
    tensors = payload.tensors if isinstance(payload, Boundary) else payload
    return [
        peer.send(packed(tensor), tag, on_host=spec.is_on_host)
        for spec, tensor in zip(form.specs, tensors, strict=True)
        if spec is not None and tensor is not None and tensor.numel()
    ]


def send(payload: Payload, peer: Peer, device: Device, tag: int) -> list[Posted]:
    """Start to send a payload of which the other end knows nothing; takes the next tag, too."""
    form = Form.of(payload, device)
    return [*send_form(form, peer, tag + 1), *send_tensors(form, payload, peer, tag)]


def receive(peer: Peer, device: Device, tag: int) -> Payload:
    """Wait for what `send` sends."""
    return Bound(receive_form(peer, tag + 1), peer, device, tag).wait()


def _landing(spec: Spec, start: int, device: Device) -> Landing:
    return Landing(spec, start, HOST if spec.is_on_host else device.torch_device)
