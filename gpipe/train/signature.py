"""Arguments from a run file, held against a signature."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from inspect import Parameter

from gpipe.train.mistake import Mistake, RunFileError, did_you_mean, nearest, show

__all__ = ["check_arguments"]

_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def check_arguments(
    section: str,
    function: Callable[..., object],
    arguments: Mapping[str, object],
    *,
    provided: Collection[str] = (),
    keys: Collection[str] = (),
) -> None:
    """Refuses arguments that `function` does not take, and the lack of those it needs.

    Args:
        section: Key path of the section that holds the arguments.
        function: What will be called with them.
        arguments: The arguments by name.
        provided: Parameters that do not come from the run file.
        keys: The section's own keys, proposed when one of them was misspelt.

    Raises:
        RunFileError: With every argument that does not fit.
    """
    parameters = _parameters(function)
    if parameters is None:
        return
    accepted = [p for p in parameters if p.name not in provided]
    label = getattr(function, "__name__", str(function))
    mistakes = [
        *_unknown(section, label, arguments, accepted, keys),
        *_missing(section, label, arguments, accepted),
    ]
    if mistakes:
        raise RunFileError(mistakes)


def _parameters(function: Callable[..., object]) -> list[Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return None  # some built-in callables have no signature to read; the call itself will tell


def _unknown(
    section: str,
    label: str,
    arguments: Mapping[str, object],
    accepted: list[Parameter],
    keys: Collection[str],
) -> Iterator[Mistake]:
    if any(p.kind is Parameter.VAR_KEYWORD for p in accepted):
        return
    names = [p.name for p in accepted if p.kind in _NAMED]
    takes = f"It takes {', '.join(names)}." if names else "It takes none."
    for name in arguments:
        if name not in names:
            near = did_you_mean(nearest(name, [*names, *keys]))
            fact = f"{label} has no argument `{name}` (value {show(arguments[name])})."
            yield Mistake(f"{section}.{name}", f"{fact}{near} {takes}")


def _missing(
    section: str, label: str, arguments: Mapping[str, object], accepted: list[Parameter]
) -> Iterator[Mistake]:
    for p in accepted:
        if p.kind in _NAMED and p.default is Parameter.empty and p.name not in arguments:
            yield Mistake(f"{section}.{p.name}", f"is missing: {label} needs it.")
