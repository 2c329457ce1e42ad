"""Windows of a file, and what stands behind each byte."""

import pytest
import torch

from gpipe.data import text
from gpipe.errors import ConfigError


@pytest.fixture
def path(tmp_path) -> str:
    file = tmp_path / "some.txt"
    file.write_bytes(bytes(range(100)))
    return str(file)


def test_the_target_is_the_next_byte(path):
    splits = text(path, num_tokens=8)
    for part in (splits.train, splits.test):
        for window, following in part:
            assert torch.equal(following, window + 1)
            assert window.dtype == torch.int64
    assert [int(window[0]) for window, _ in splits.train] == list(range(0, 81, 8))
    assert int(splits.test[0][0][0]) == 90


def test_windows_may_overlap(path):
    assert len(text(path, num_tokens=8, stride=2).train) == 41


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": 10}, "the smaller part has 10: too few for a window of 10"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"stride": 0}, "stride"),
        ({"test_fraction": 1.5}, "test_fraction is 1.5"),
        ({"test_fraction": float("nan")}, "test_fraction is nan"),
        ({"num_tokens": 10**30}, "too few for a window"),
    ],
)
def test_what_cannot_be_cut_is_refused(path, options, message):
    with pytest.raises(ValueError, match=message):
        text(path, **options)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.txt cannot be read \(No such file"):
        text(str(tmp_path / "nothing.txt"))


# These were told in Python's own words.
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_fraction": "half"}, "test_fraction is 'half'. Give a number between 0 and 1"),
        ({"test_fraction": None}, "test_fraction is None. Give a number"),
        ({"test_fraction": True}, "test_fraction is True. Give a number"),
        ({"num_tokens": "8"}, "num_tokens` is '8'"),
        ({"stride": 1.5}, "stride` is 1.5"),
        ({"path": 5}, "path is 5. Name a file"),
        ({"path": None}, "path is None. Name a file"),
    ],
)
def test_what_has_the_wrong_type_is_told(path, options, message):
    with pytest.raises(TypeError, match=message):
        text(**{"path": path, "num_tokens": 8} | options)


def test_an_empty_file_is_told(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"empty\.txt is empty\. Use a longer"):
        text(str(tmp_path / "empty.txt"))


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, ""])
def test_a_name_that_cannot_be_is_told(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be read"):
        text(str(tmp_path / name))


def test_a_stride_beyond_the_end_leaves_one_window(path):
    splits = text(path, num_tokens=8, stride=10**30)
    assert len(splits.train) == len(splits.test) == 1
