"""The modules that a function computes with."""

from collections.abc import Iterable
from dataclasses import is_dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

__all__ = ["modules_in"]


def modules_in(function: Any) -> list[nn.Module]:
    """The module that a function is, or those that it refers to.

    They are found in what `partial` and closures hold, in a method's object, in dataclasses and
    among the global names that the function uses.
    """
    modules: list[nn.Module] = []
    waiting, seen = [function], set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            modules.append(value)
        else:
            waiting += _parts(value)
    return modules


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        return _parts_of_function(value)
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, dict) or (is_dataclass(value) and not isinstance(value, type)):
        return list((value if isinstance(value, dict) else vars(value)).values())
    return []


def _parts_of_function(function: FunctionType) -> list[Any]:
    in_cells = [_content(cell) for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    # Of global names only modules: other functions would lead through whole libraries.
    used = [value for value in named if isinstance(value, nn.Module)]
    return [*in_cells, *defaults, *used]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been put there yet
        return None
