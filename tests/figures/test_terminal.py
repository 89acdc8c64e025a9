import io

from rich.console import Console

from normkit.figures import Table
from normkit.figures.terminal import rich_table


def test_numbers_stand_right_and_names_are_no_markup():
    console = Console(file=io.StringIO(), width=80)
    console.print(rich_table(Table("the [red]title", ["name", "value"], [["blocks[0]", 0.5], ["b", 12.25]])))
    lines = console.file.getvalue().splitlines()
    assert lines[0].strip() == "the [red]title"
    assert [line.split("│")[1:3] for line in lines if "blocks" in line] == [[" blocks[0] ", "  0.50 "]]
    assert any(line.split("│")[1:3] == [" b         ", " 12.25 "] for line in lines)
