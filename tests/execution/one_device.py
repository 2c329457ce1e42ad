"""An accelerator without hardware: to autograd it is what one CUDA device is.

What autograd does on an accelerator, such as to run all backwards of a device on one thread, cannot
be seen with CPU tensors. PyTorch lets Python claim its spare device type, PrivateUse1, and treats
tensors of that type like those of any accelerator. Here each of them has its bytes in a storage of
the CPU, and each operator runs there, in the thread that called it: there are no streams.

Registering cannot be undone: do it in a process of its own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from gpipe.stage.device import Device, register_device

__all__ = ["DEVICE", "register"]

NAME = "onedevice"
DEVICE = f"{NAME}:0"
CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# Kernels are unregistered when their library object goes.
_libraries: list[torch.library.Library] = []


def register() -> None:
    """Make `DEVICE` a device of this process; once."""
    _setup_privateuseone_for_python_backend(NAME)
    every_operator = torch.library.Library("_", "IMPL")
    every_operator.fallback(_run_on_cpu, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    # `Tensor.to` and `copy_` end here when one of the two tensors is ours.
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    _libraries.extend([every_operator, aten])
    register_device(Device(torch.device(DEVICE)))  # without streams


def _run_on_cpu(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operator on CPU tensors that have the bytes of the device's tensors.

    As on CUDA, a number in a tensor may come from the CPU, and nothing else.
    """
    lent: list[tuple[Tensor, Tensor]] = []

    def lend(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if _is_ours(value):
            lent.append((_on_cpu(value), value))
            return lent[-1][0]
        if isinstance(value, Tensor) and value.dim() > 0:
            raise RuntimeError(f"{operator} has got tensors of {NAME} and of {value.device}.")
        return value

    args, kwargs = pytree.tree_map(lend, (args, kwargs))
    return pytree.tree_map(lambda result: _give_back(result, lent), operator(*args, **kwargs))


def _give_back(result: Any, lent: list[tuple[Tensor, Tensor]]) -> Any:
    """The device's tensor for a result: an argument itself, a view of one, or a new one."""
    if not isinstance(result, Tensor):
        return result
    for alias, argument in lent:
        if result is alias and _layout(result) == _layout(argument):
            return argument
        if result is alias:  # an `out=` that has got a new size
            return _laid_out(argument, _storage_over(result.untyped_storage()), result)
        if result.untyped_storage()._cdata == alias.untyped_storage()._cdata:
            return _laid_out(_empty(result), argument.untyped_storage(), result)
    return _laid_out(_empty(result), _storage_over(result.untyped_storage()), result)


def _storage_over(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage of the device whose bytes are those of the CPU's storage."""
    storage: Any = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), torch.device(DEVICE), memory.nbytes()
    )
    # The storage itself only points there. The attribute keeps the bytes for as long as any tensor
    # shares the storage, also one that C++ made, such as by detach() or to save it for a backward.
    storage.memory = memory
    return storage


def _empty(like: Tensor) -> Tensor:
    return torch._C._acc.create_empty_tensor((0,), like.dtype)


def _laid_out(tensor: Tensor, storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """Give a tensor of the device this storage, and the layout of the CPU's tensor `like`."""
    # The CPU's kernel serves any device: it writes down what it is given.
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    return set_.redispatch(CPU_KERNEL, tensor, storage, *_layout(like))


def _on_cpu(tensor: Tensor) -> Tensor:
    memory = tensor.untyped_storage().memory  # type: ignore[attr-defined]
    return torch.empty(0, dtype=tensor.dtype).set_(memory, *_layout(tensor))


def _layout(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.storage_offset(), tensor.size(), tensor.stride()


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    source_cpu, to_cpu = (_on_cpu(side) if _is_ours(side) else side for side in (source, to))
    to_cpu.copy_(source_cpu)
    return to


def _is_ours(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME
