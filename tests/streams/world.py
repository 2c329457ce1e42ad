"""A world of fake accelerators around whatever runs in it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe.execution import gate
from gpipe.stage import device as device_module
from gpipe.stage.device import HOST, register_device
from tests.streams.fakes import NAME, Call, FakeAccelerator, FakeStream, World, tensors_in

__all__ = ["world"]


class Places(TorchFunctionMode):
    """Lets tensors tell where they live in a world, and go elsewhere."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(function, torch._ops.OpOverload):  # from `Operators`
            return function(*args, **kwargs)
        if getattr(function, "__self__", None) is torch.Tensor.device:
            home = self._world.home(args[0])
            return HOST if home is None else home.torch_device
        if function in (torch.Tensor.to, torch.Tensor.cpu):
            return self._moved(function, *args, **kwargs)
        if function is torch.Tensor.new_tensor:
            self._world.synchronize({}, "new_tensor")  # it copies from the host, blocking
            return self._world.make(self._world.home(args[0]), function, args, kwargs)
        if kwargs.get("device") is None:
            return self._world.make(None, function, args, kwargs)
        device = torch.device(kwargs.pop("device"))
        return self._world.make(self._fake(device), function, args, kwargs | {"device": HOST})

    def _moved(self, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if function is torch.Tensor.cpu:
            args = (HOST,)
        if args and isinstance(args[0], Tensor):
            raise NotImplementedError("to(other tensor)")
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and self._fake(device) is not self._world.home(tensor):
            tensor = self._world.move(tensor, self._fake(device), non_blocking)
        return tensor if dtype is None else tensor.to(dtype)

    def _fake(self, device: torch.device) -> FakeAccelerator | None:
        return self._world.devices[device.index] if device.type == NAME else None


class Operators(TorchDispatchMode):
    """Books every operator of a world, those of backwards too."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        if not self._world.is_paused:
            names = [argument.name for argument in function._schema.arguments]
            named = [*zip(names, args, strict=False), *(kwargs or {}).items()]
            with self._world.detector.lock:
                self._world.book(function, named, list(tensors_in(results)))
        return results


@contextmanager
def world(num_devices: int, left_out: Sequence[Call] = ()) -> Iterator[World]:
    """A world in which `GPipe` finds its devices."""
    made, known = World(num_devices, left_out), device_module._members
    device_module._members = dict(known)
    for device in made.devices:
        register_device(device)
    try:
        with Places(made), Operators(made), _nodes_as_with_accelerators(made):
            yield made
    finally:
        device_module._members = known


@contextmanager
def _nodes_as_with_accelerators(made: World) -> Iterator[None]:
    """Run the backwards of the engine's nodes in the world, that of the outputs on its streams.

    Torch has switched the mode off by then, since `Tensor.backward` went through it.
    """
    emit, gated = gate._Emit, gate._Gate
    forward, backward, gated_backward = emit.forward, emit.backward, gated.backward

    def noting_forward(ctx: Any, *args: Any) -> Any:
        ctx.streams = [device.current_stream() for device in made.devices]
        return forward(ctx, *args)

    def backward_there(ctx: Any, *gradients: Any) -> Any:
        for stream in ctx.streams:
            stream.wait_event(stream.device.current_stream().record_event())
        with Places(made):
            return _on_all(made.devices, ctx.streams, lambda: backward(ctx, *gradients))

    def backward_here(ctx: Any, token: Tensor) -> Any:
        with Places(made):
            return gated_backward(ctx, token)

    with ExitStack() as stack:
        for node, name, function in (
            (emit, "forward", noting_forward),
            (emit, "backward", backward_there),
            (gated, "backward", backward_here),
        ):
            stack.enter_context(patch.object(node, name, staticmethod(function)))
        yield


def _on_all(
    devices: Sequence[FakeAccelerator], streams: Sequence[FakeStream], function: Callable[[], Any]
) -> Any:
    if not devices:
        return function()
    with devices[0].on(streams[0]):
        return _on_all(devices[1:], streams[1:], function)
