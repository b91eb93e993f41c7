"""How tables look: colours, columns, numbers."""

from __future__ import annotations

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

# Blue and vermilion of Okabe and Ito (https://jfly.uni-koeln.de/color/): told apart under every common colour
# blindness, and readable on white as well as on black. Colour only repeats what a word or number says.
GOOD = "#0072B2"
BAD = "#D55E00"
OUTCOME_STYLES = {"calls": "", "warmups": "", "captures": "", "replays": GOOD, "eager": BAD, "errors": BAD}


def new_table(title: str, leading: int = 0) -> Table:
    return Table(box=box.SIMPLE, title=Text(title, style="bold"), title_justify="left", leading=leading)


def add_number_column(table: Table, name: str, footer: RenderableType) -> None:
    table.add_column(name, footer=footer, justify="right", no_wrap=True)


def number_cell(number: int, style: str) -> Text:
    return Text(f"{number}", style=style if number else "dim")
