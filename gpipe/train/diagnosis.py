"""What pydantic found, in words a user can act on."""

import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from gpipe.train.mistake import Mistake, did_you_mean, nearest, show

__all__ = ["diagnose"]

_Sections = type[BaseModel]


@dataclass(frozen=True)
class _Place:
    """Where a location leads: the last section on the way, and the field in it, if known."""

    path: str
    section: _Sections
    field: FieldInfo | None


def diagnose(error: ValidationError, root: type[BaseModel]) -> list[Mistake]:
    """One mistake for every wrong place; `root` is the model that was validated.

    Several findings at one field (each member of a union says no) count once.
    """
    mistakes: dict[str, Mistake] = {}
    for details in error.errors(include_url=False):
        mistake = _mistake(details, root)
        mistakes.setdefault(mistake.path, mistake)
    return list(mistakes.values())


def _mistake(details: ErrorDetails, root: _Sections) -> Mistake:
    place = _locate(details["loc"], root)
    if details["type"] == "extra_forbidden":
        return Mistake(place.path, _unknown(str(details["loc"][-1]), details["input"], place, root))
    if details["type"] == "told":
        return Mistake(f"{place.path}.{details['ctx']['key']}", details["msg"])
    if details["type"] == "missing":
        return Mistake(place.path, f"is missing. Give {_allowed(place)}.")
    value = details["input"]
    near = did_you_mean(nearest(str(value), _choices(place.field)))
    return Mistake(place.path, f"{show(value)} is not allowed. Give {_allowed(place)}.{near}")


def _locate(location: Sequence[int | str], root: _Sections) -> _Place:
    section, field, path = root, None, ""
    for key in location:
        if field is not None and not _is_section(field.annotation):
            break  # what follows are positions in lists and members of unions
        if field is not None:
            section = typing.cast(_Sections, field.annotation)
        field = section.model_fields.get(str(key))
        path = f"{path}.{key}" if path else str(key)
    return _Place(path, section, field)


def _unknown(key: str, value: object, place: _Place, root: _Sections) -> str:
    here = list(place.section.model_fields)
    near = did_you_mean(nearest(key, here) or _elsewhere(key, root))
    return f"is no key (value {show(value)}).{near} Known keys here: {', '.join(here)}."


def _elsewhere(key: str, root: _Sections) -> str | None:
    """The key path of another section that ends in a word like `key`."""
    by_name = {path.rpartition(".")[2]: path for path in _paths(root)}
    near = nearest(key, by_name)
    return by_name[near] if near else None


def _paths(section: _Sections, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if _is_section(field.annotation):
            yield from _paths(typing.cast(_Sections, field.annotation), f"{prefix}{name}.")


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _allowed(place: _Place) -> str:
    if place.field is None:
        return "keys that are text"
    if not _is_section(place.field.annotation):
        return place.field.description or "another value"
    section = typing.cast(_Sections, place.field.annotation)
    more = " and arguments" if section.model_config.get("extra") == "allow" else ""
    return f"a section with the keys {', '.join(section.model_fields)}{more}"


def _choices(field: FieldInfo | None) -> list[str]:
    """The words that a field allows, also inside a union."""
    return list(_words(field.annotation)) if field else []


def _words(annotation: object) -> Iterator[str]:
    for argument in typing.get_args(annotation):
        if isinstance(argument, str):
            yield argument
        else:
            yield from _words(argument)
