"""A payload that goes to another worker together with what it looks like."""

from gpipe.execution.peer import Peer, Posted, wait_for
from gpipe.stage.boundary import Boundary, Gradients, Payload
from gpipe.stage.device import HOST, Device
from gpipe.stage.form import Form, Landing

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
        self._landings: list[Landing | None] = []
        self._posted: list[Posted] = []
        for spec, start in zip(form.specs, form.starts, strict=True):
            landing = None
            if spec is not None:
                place = HOST if spec.is_on_host else device.torch_device
                landing = Landing(spec, start, place)
                if landing.line.numel():
                    posted = peer.receive(landing.line, tag, on_host=spec.is_on_host)
                    self._posted.append(posted)
            self._landings.append(landing)

    def wait(self) -> Payload:
        """Wait until all of it is there."""
        wait_for(self._posted)
        tensors: Gradients = [
            None if landing is None else landing.tensor() for landing in self._landings
        ]
        return self._form.filled(tensors)


def send_form(form: Form, peer: Peer, tag: int) -> tuple[Form, list[Posted]]:
    """Start to tell how a payload looks; the form as both ends know it then."""
    form, data = form.told()
    return form, peer.send_bytes(data, tag)


def receive_form(peer: Peer, tag: int) -> Form:
    """Wait until that is known."""
    return Form.heard(peer.receive_bytes(tag))


def send_tensors(form: Form, payload: Payload, peer: Peer, tag: int) -> list[Posted]:
    """Start to send the tensors of a payload."""
    tensors = payload.tensors if isinstance(payload, Boundary) else payload
    return [
        peer.send(spec.packed(tensor), tag, on_host=spec.is_on_host)
        for spec, tensor in zip(form.specs, tensors, strict=True)
        if spec is not None and tensor is not None and tensor.numel()
    ]


def send(payload: Payload, peer: Peer, device: Device, tag: int) -> list[Posted]:
    """Start to send a payload of which the other end knows nothing; takes the next tag, too."""
    form, posted = send_form(Form.of(payload, device), peer, tag + 1)
    return [*posted, *send_tensors(form, payload, peer, tag)]


def receive(peer: Peer, device: Device, tag: int) -> Payload:
    """Wait for what `send` sends."""
    return Bound(receive_form(peer, tag + 1), peer, device, tag).wait()
