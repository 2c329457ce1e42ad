"""Callables that a run file names as "module:callable"."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

from gpipe.train.config import DataConfig, ModelConfig
from gpipe.train.mistake import Mistake, RunFileError, did_you_mean, nearest
from gpipe.train.signature import check_arguments

__all__ = ["Factory", "resolve", "resolve_factory"]


@dataclass(frozen=True)
class Factory:
    """A callable and the arguments that the run file gives it, known to fit."""

    section: str
    name: str
    function: Callable[..., object]
    arguments: Mapping[str, object]

    def __call__(self) -> object:
        """Calls it.

        Raises:
            RunFileError: One of gpipe's own factories refuses a value.
            Exception: Whatever a factory of the user raises, as itself, with a note.
        """
        try:
            return self.function(**self.arguments)
        except Exception as error:
            if self._is_ours and isinstance(error, TypeError | ValueError):
                raise RunFileError([Mistake(self.section, str(error))]) from error
            error.add_note(f"It was raised while `{self.section}.factory`, {self.name}, ran.")
            raise

    @property
    def _is_ours(self) -> bool:
        # Ours raise these two for wrong values only; in the user's code they may be any bug,
        # which is found by its traceback.
        return self.name.startswith("gpipe.")


def resolve_factory(section: str, config: ModelConfig | DataConfig) -> Factory:
    """Finds the factory of a section and checks its arguments, without calling it.

    Raises:
        RunFileError: There is no such callable, or the arguments do not fit it.
    """
    function = resolve(f"{section}.factory", config.factory)
    keys = type(config).model_fields
    check_arguments(section, function, config.arguments, keys=keys)
    return Factory(section, config.factory, function, config.arguments)


def resolve(path: str, name: str) -> Callable[..., object]:
    """Finds what `name`, "module:callable", names.

    Raises:
        RunFileError: At `path`: no such module, nothing of that name in it, or not callable.
    """
    module_name, _, attributes = name.partition(":")
    found: object = _module(path, module_name)
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            near = did_you_mean(nearest(attribute, dir(found)))
            raise _wrong(path, f"{_label(found)} has no `{attribute}`.{near}")
        found = getattr(found, attribute)
    if not callable(found):
        raise _wrong(path, f'"{name}" is of type {type(found).__name__}. Name something to call.')
    return found


def _module(path: str, name: str) -> ModuleType:
    if name.startswith("."):
        raise _wrong(
            path, f'"{name}" is relative. Name the module in full, such as "package.name".'
        )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that is found but imports one that is not has a fault of its own: let it show.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise _wrong(
            path,
            f"there is no module `{error.name}`. Install it, or start gpipe in the folder"
            " that holds it.",
        ) from None


def _label(owner: object) -> str:
    kind = "module" if isinstance(owner, ModuleType) else "object"
    return f"the {kind} `{getattr(owner, '__name__', owner)}`"


def _wrong(path: str, text: str) -> RunFileError:
    return RunFileError([Mistake(path, text)])
