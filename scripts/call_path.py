"""Draws the picture of docs/how_it_works.md:  python scripts/call_path.py

Every word stands in a filled box and lines are of a middle grey, so that the picture reads on a light page and on a
dark one. The colours are those of Okabe and Ito, lightened. Needs nothing but Python.
"""

from html import escape
from pathlib import Path

PICTURE = Path(__file__).parent.parent / "docs" / "_static" / "call_path.svg"

WIDTH, HEIGHT = 920, 812
INK, LINE = "#1b1f24", "#8a8f98"
PLAIN, ASK, ACT, EAGER, REPLAY = "#e8eaed", "#fff3c4", "#cfe8fb", "#ffd9c2", "#c9eedd"


def box(x: int, y: int, width: int, height: int, fill: str, title: str, *lines: str) -> str:
    """A filled box with a bold first line and further lines below it."""
    middle = x + width / 2
    top = y + height / 2 - 9 * len(lines) + 5
    text = [f'<text x="{middle}" y="{top}" class="title">{escape(title)}</text>']
    text += [
        f'<text x="{middle}" y="{top + 18 * (index + 1)}">{escape(line)}</text>' for index, line in enumerate(lines)
    ]
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{LINE}"/>'
    return shape + "".join(text)


def arrow(*points: tuple[int, int], doubt: bool = False) -> str:
    """A line with a head at its end; dashed where there is a doubt."""
    path = " ".join(f"{'L' if index else 'M'}{x} {y}" for index, (x, y) in enumerate(points))
    dashes = ' stroke-dasharray="6 5"' if doubt else ""
    return f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="2"{dashes} marker-end="url(#head)"/>'


def label(x: int, y: int, text: str) -> str:
    """A word on a line."""
    width = 14 + 7.2 * len(text)
    return (
        f'<rect x="{x - width / 2}" y="{y - 11}" width="{width}" height="22" rx="11" fill="{PLAIN}"/>'
        f'<text x="{x}" y="{y + 5}" class="word">{escape(text)}</text>'
    )


def draw() -> str:
    """The whole picture."""
    parts = [
        # lines first, since boxes lie on top of them
        arrow((250, 62), (250, 88)),
        arrow((250, 142), (250, 168)),
        arrow((250, 222), (250, 248)),
        arrow((250, 302), (250, 328)),
        arrow((250, 382), (250, 420)),
        arrow((160, 446), (110, 446), (110, 500)),
        arrow((250, 472), (250, 500)),
        arrow((340, 446), (505, 446), (505, 500)),
        arrow((110, 572), (110, 760), (149, 760)),
        arrow((250, 590), (250, 732)),
        arrow((505, 706), (505, 760), (351, 760)),
        arrow((400, 275), (600, 275), (600, 500)),
        # doubts
        arrow((400, 195), (736, 195), doubt=True),
        arrow((400, 355), (736, 355), doubt=True),
        arrow((340, 434), (736, 434), doubt=True),
        arrow((650, 545), (736, 545), doubt=True),
        arrow((822, 620), (822, 772), (351, 772)),
        # the way of a call
        box(100, 12, 300, 50, PLAIN, "module(*args, **kwargs)", "pre-hook: opens a record of the call"),
        box(100, 88, 300, 54, PLAIN, "seam", "in the forward slot; forward(…) meets it, too"),
        box(100, 168, 300, 54, ASK, "stand aside?", "paused, disabled, training, traced, watched"),
        box(100, 248, 300, 54, ASK, "looks like a recent call?", "types, values, shapes, strides, surroundings"),
        box(100, 328, 300, 54, ASK, "signature", "of the arguments and of their surroundings"),
        box(160, 420, 180, 52, ASK, "policy.decide()", "a pure function"),
        box(20, 500, 160, 72, ACT, "warm up", "a real eager call", "under the audit"),
        box(190, 500, 150, 90, ACT, "capture", "record, replay,", "run eager, compare;", "eager's value returns"),
        box(
            360, 500, 290, 206, REPLAY, "replay",
            "guards: memory is where it was", "copy in, one copy per dtype", "launch",
            "clone out (the device is at work)", "guards: identity, tree, hooks, state",
            "write back what the forward changed", "on probation: run eager, too, and compare", "a change drops the graph: warm up again",
        ),
        box(150, 732, 200, 56, PLAIN, "post-hook", "closes the record"),
        box(736, 150, 172, 470, EAGER, "the plain forward", "", "one outcome: eager", "one reason, counted", "", "as if hookgraph", "were not there"),
        label(568, 195, "yes"),
        label(500, 275, "yes"),
        label(290, 315, "no"),
        label(680, 355, "has none"),
        label(680, 434, "eager"),
        label(679, 545, "doubt"),
    ]  # fmt: skip
    head = (
        f'<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L10 5 L0 10 z" fill="{LINE}"/></marker>'
    )
    style = (
        f'text {{ font: 13px "DejaVu Sans", Verdana, sans-serif; fill: {INK}; text-anchor: middle }}'
        ".title { font-weight: bold; font-size: 14px } .word { font-size: 12px }"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img"><title>The way of one call through hookgraph</title><style>{style}</style><defs>{head}</defs>'
        + "\n".join(parts)
        + "</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(f"wrote {PICTURE}")
