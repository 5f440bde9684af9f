"""How values are written for people: counts, sizes, ranges and tables."""

import pytest

from launcher.output.text import count, ranges, size, table


@pytest.mark.parametrize(
    ("ranks", "text"), [((0, 1, 2, 5), "0-2,5"), ((7,), "7"), ((3, 1), "1,3"), ((0, 1), "0-1"), ((), "")]
)
def test_ranks_are_written_in_short(ranks: tuple[int, ...], text: str) -> None:
    assert ranges(ranks) == text


def test_a_noun_is_written_in_the_plural_but_for_one() -> None:
    assert [count(number, "host") for number in (0, 1, 2)] == ["0 hosts", "1 host", "2 hosts"]
    assert count(3, "process") == "3 processes"


def test_a_size_is_written_in_the_largest_unit_that_it_fills() -> None:
    assert [size(number) for number in (0, 1023, 1536, 10 << 20, 3 << 50)] == [
        "0 B", "1023 B", "1.5 KB", "10 MB", "3072 TB",
    ]  # fmt: skip


def test_a_table_shows_texts_without_what_steers_a_terminal() -> None:
    header, _, *rows = table([{"host": "[red]a", "memory": "\x1b[31m1 GB\a"}, {"host": "b", "memory": "x" * 200}])
    assert header.split() == ["host", "memory"]
    assert rows[0].split() == ["[red]a", "1", "GB\\x07"]
    assert "".join(rows[1:]).count("x") == 200, "a long cell is folded"


def test_a_table_keeps_the_id_of_a_run_in_one_piece() -> None:
    lines = table([{"run": "20261123-012358-ecc5", **dict.fromkeys("abcdef", "x" * 20), "command": "y" * 60}])
    assert [line for line in lines if "20261123-012358-ecc5 " in line]
