"""Line charts as SVG, readable on light and dark backgrounds, with labels at the end of each line."""

import itertools
import math
from html import escape

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 56, 48
GREY = "#868e96"
COLOURS = [
    "#2f9e44", "#e8590c", "#f08c00", "#7048e8", "#1c7ed6", "#22b8cf", "#d6336c", "#846358", "#5c940d", "#0b7285", "#a61e4d", "#f783ac",
]  # fmt: skip
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #343a40 }
  .title { font-size: 15px; font-weight: 600 }
  .quiet { fill: #868e96 }
  .grid { stroke: #868e96; stroke-opacity: .25 }
  .line { fill: none; stroke-width: 2; stroke-linejoin: round }
  .ours { stroke-width: 3.5 }
  .baseline { stroke-dasharray: 5 4 }
  @media (prefers-color-scheme: dark) { text { fill: #dee2e6 } .quiet { fill: #adb5bd } }
"""


def svg(panels):
    """One or more panels, stacked vertically."""
    height = HEIGHT * len(panels)
    placed = "\n".join(f'<g transform="translate(0 {HEIGHT * index})">{panel}</g>' for index, panel in enumerate(panels))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return f"{head}\n<style>{STYLE}</style>\n{placed}\n</svg>\n"


def panel(title, unit, x_title, x_labels, series, logarithmic=False):
    """`series`: tuples of (name, values, class); None as a value leaves a gap."""
    known = [value for _, values, _ in series for value in values if value]
    ticks = log_ticks(min(known), max(known)) if logarithmic else even_ticks(max(known))
    scale = math.log10 if logarithmic else float
    low, high = scale(ticks[0]), scale(ticks[-1])
    step = (WIDTH - LEFT - RIGHT) / max(len(x_labels) - 1, 1)
    x = lambda index: LEFT + step * index
    y = lambda value: HEIGHT - BOTTOM - (scale(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [text(LEFT, 24, title, "title"), text(LEFT, 42, unit, "quiet")]
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(text(LEFT - 8, y(tick) + 4, f"{tick:,.10g}", anchor="end"))
    for index, label in enumerate(x_labels):
        parts.append(text(x(index), HEIGHT - BOTTOM + 20, label, anchor="middle"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_title, "quiet", "middle"))

    names, colours = [], itertools.cycle(COLOURS)
    for name, values, kind in series:
        colour = GREY if kind == "baseline" else next(colours)
        points = [(x(index), y(value)) for index, value in enumerate(values) if value]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline class="line {kind}" stroke="{colour}" points="{path}"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points]
        names.append([points[-1][1], name, colour])
    for name_y, name, colour in apart(names):
        parts.append(f'<circle cx="{WIDTH - RIGHT + 14}" cy="{name_y:.1f}" r="4" fill="{colour}"/>')
        parts.append(text(WIDTH - RIGHT + 23, name_y + 4, name))
    return "\n".join(parts)


def text(x, y, words, kind="", anchor="start"):
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(str(words))}</text>'


def apart(names, gap=16):
    """Separates overlapping labels, and keeps them above the x axis."""
    names = sorted(names)
    for before, name in zip(names, names[1:], strict=False):
        name[0] = max(name[0], before[0] + gap)
    overshoot = names[-1][0] - (HEIGHT - BOTTOM)
    return [[y - max(overshoot, 0), name, colour] for y, name, colour in names]


def log_ticks(low, high):
    """Powers of ten that span the values."""
    return [10**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high) + 1e-9) + 1)]


def even_ticks(high):
    """Four to eight ticks from 0."""
    rough = high / 5
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough)
    return [step * index for index in range(math.ceil(high / step) + 1)]
