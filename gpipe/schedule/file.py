"""The files that schedules are kept in."""

from os import PathLike
from pathlib import Path

from gpipe.errors import ScheduleError
from gpipe.schedule.notation import from_text, to_text
from gpipe.schedule.schedule import Schedule
from gpipe.schedule.torch_csv import from_csv, to_csv

__all__ = ["load_schedule", "save_schedule"]


def load_schedule(path: str | PathLike[str]) -> Schedule:
    """Reads a schedule from a file.

    Args:
        path: One whose name ends in `.csv` holds torch's CSV form, any other the text form.

    Returns:
        The schedule; it is not checked.

    Raises:
        ScheduleError: The file cannot be read, or what is in it is no schedule.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ScheduleError(f"There is no file {path}. Check the path.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{path} cannot be read: {error}. Pass a text file.") from error
    try:
        return from_csv(text) if _is_csv(path) else from_text(text)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error


def save_schedule(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Writes a schedule to a file, in the form that `load_schedule` expects there."""
    path = Path(path)
    path.write_text(to_csv(schedule) if _is_csv(path) else to_text(schedule), encoding="utf-8")


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"
