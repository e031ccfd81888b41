"""Tables at every width: no line is too long, no key column is lost, nothing is cut off."""

from __future__ import annotations

from rich.cells import cell_len
from tests.support.in_turn import in_turn

from covey.cli.layout import Column, lay_out, table, wrap

NODES = ["north-aaaq", "south-bbbq"]
WHY = "the clocks of the two machines are more than a minute apart"


def columns() -> list[Column]:
    return [
        Column("RANK", ["0", "12"], is_right=True),
        Column("NODE", NODES),
        Column("ID", ["a" * 8, "b" * 8], leave_out=2),
        Column("PID", ["123", ""], leave_out=1),
        Column("WHY", ["", WHY], wraps=True),
    ]


def test_with_enough_room_everything_is_in_aligned_columns_without_blanks_at_the_ends() -> None:
    assert table(columns(), None).splitlines() == [
        "RANK  NODE        ID        PID  WHY",
        "   0  north-aaaq  aaaaaaaa  123",
        f"  12  south-bbbq  bbbbbbbb       {WHY}",
    ]


@in_turn(width=range(20, 130))
def test_at_every_width_the_key_columns_and_all_words_are_there(width: int) -> None:
    text = table(columns(), width)
    for line in text.splitlines():
        assert len(line) <= width
        assert line == line.rstrip()
    for word in (*NODES, "RANK", "NODE", *WHY.split()):
        assert word in text
    assert ("PID" in text) >= ("ID" in text.replace("PID", ""))  # the id is left out before the pid


def test_what_does_not_fit_at_all_becomes_a_few_lines_for_each_row() -> None:
    wide = [Column("CLUSTER", ["home", "den"]), Column("FILE", ["/" + "f" * 30, ""])]
    assert table(wide, 24).splitlines() == [
        "CLUSTER  home",
        "FILE     /ffffffffffffff",
        "         fffffffffffffff",
        "         f",
        "",
        "CLUSTER  den",
    ]


def test_styles_stay_with_their_text_and_an_empty_table_is_nothing() -> None:
    line = lay_out([Column("", [("silent", "yellow")]), Column("A", ["b"])], 80, "dim")[1]
    assert line == [("silent", "yellow"), ("  ", ""), ("b", "")]
    assert lay_out([Column("A", [])], 80) == []


def test_wide_letters_count_twice() -> None:
    assert [cell_len(line) for line in wrap("機械学習 a", 4)] == [4, 4, 1]


def test_an_indented_text_is_indented_in_every_line() -> None:
    assert wrap("  waits: 1 more node", 12) == ["  waits: 1", "  more node"]
