"""Numbers of bytes, written and read."""

import pytest

from gpipe.units import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (16 * 2**30, "16.0 GiB")],
)
def test_bytes_in_words(number, text):
    assert show_bytes(number) == text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 GiB", 16 * 2**30),
        ("16gib", 16 * 2**30),
        ("1.5 MB", 1.5e6),
        ("12 GB/s", 12e9),
        ("1e3", 1000),
        (4096, 4096),
        ("7 B", 7),
    ],
)
def test_words_in_bytes(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "much", "-1", "16 GiBs", "1e400", "nan", "GiB", "1.2.3"])
def test_no_number_is_refused(text):
    with pytest.raises(ValueError, match="is no number of bytes"):
        parse_bytes(text)
