"""Small charts without a plotting library: an SVG line chart, bars, and interval tracks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from hsql_env.analysis.markup import Markup, number, percent, tag

Point = tuple[float, float]

WIDTH, HEIGHT = 340, 190  # viewBox units, about the pixels of one panel
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 10, 24
MAX_POINTS = 200  # of the line as drawn
MAX_HOVERS = 40  # places that answer to the pointer


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers (1, 2 or 5 times 10^k) that enclose the range."""
    span = (high - low) or abs(high) or 1.0
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def bin_means(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most `limit` points, each the mean of as many neighbours."""
    size = math.ceil(len(points) / limit) if points else 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Return the running mean over a centred window of `window` points."""
    half = window // 2
    values = [y for _, y in points]
    means = []
    for i, (x, _) in enumerate(points):
        near = values[max(0, i - half) : i + half + 1]
        means.append((x, sum(near) / len(near)))
    return means


class _Scale:
    """Data coordinates to viewBox coordinates; the value axis contains 0."""

    def __init__(self, points: Sequence[Point]) -> None:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        self.x_low, self.x_high = min(xs), max(xs)
        self.y_ticks = ticks(min(0.0, *ys), max(0.0, *ys))
        self.x_ticks = [t for t in ticks(self.x_low, self.x_high) if t <= self.x_high]

    def x(self, value: float) -> float:
        share = (value - self.x_low) / ((self.x_high - self.x_low) or 1)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    def path(self, points: Sequence[Point]) -> str:
        return "M" + "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)


def line_chart(title: str, points: Sequence[Point], x_name: str = "step") -> Markup:
    """Return a figure of one curve, the raw values faint behind their running mean.

    `points` are at least two (x, y) of finite numbers, in order of x.
    """
    drawn = bin_means(points, MAX_POINTS)
    mean = smooth(drawn, max(1, len(drawn) // 16))
    scale = _Scale(drawn)
    start, end = mean[0][1], mean[-1][1]
    words = f"{title}: {number(start)} at first, {number(end)} at the end, by {x_name}"
    svg = tag(
        "svg",
        *_axes(scale),
        tag("path", class_="raw", d=scale.path(drawn)),
        tag("path", class_="mean", d=scale.path(mean)),
        *_hovers(scale, bin_means(points, MAX_HOVERS), x_name),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=words,
    )
    head = tag("figcaption", tag("span", title), tag("strong", number(end), title="at the end"))
    return tag("figure", head, svg, class_="chart")


def _axes(scale: _Scale) -> Iterator[Markup]:
    for value in scale.y_ticks:
        y = scale.y(value)
        yield tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y)
        yield tag("text", number(value), x=LEFT - 6, y=y + 3.5, text_anchor="end")
    for value in scale.x_ticks:
        x = scale.x(max(value, scale.x_low))
        yield tag("text", number(value), x=x, y=HEIGHT - 7, text_anchor="middle")


def _hovers(scale: _Scale, points: Sequence[Point], x_name: str) -> Iterator[Markup]:
    """Yield strips that show their value under the pointer, by CSS alone."""
    width = (WIDTH - LEFT - RIGHT) / len(points)
    for x, y in points:
        px, py = scale.x(x), scale.y(y)
        anchor = "end" if px > WIDTH / 2 else "start"
        shift = -8 if anchor == "end" else 8
        yield tag(
            "g",
            tag("rect", x=round(px - width / 2, 1), y=0, width=round(width, 1), height=HEIGHT),
            tag("line", x1=px, x2=px, y1=TOP, y2=HEIGHT - BOTTOM),
            tag("circle", cx=px, cy=py, r=3.5),
            tag(
                "text",
                f"{number(y)} at {x_name} {number(round(x))}",
                x=px + shift,
                y=TOP + 10,
                text_anchor=anchor,
            ),
            class_="hover",
        )


def bars(
    counts: Mapping[str, float], caption: str, show: Mapping[str, str] | None = None
) -> Markup:
    """Return a list of horizontal bars, scaled to the largest; `show` replaces the numbers."""
    top = max(counts.values(), default=0) or 1
    items = [
        tag(
            "li",
            tag("span", name, class_="name"),
            tag("span", tag("i", style=f"width:{100 * max(value, 0) / top:.1f}%"), class_="track"),
            tag("span", show[name] if show else number(value), class_="value"),
        )
        for name, value in counts.items()
    ]
    return tag("div", tag("h4", caption), tag("ul", *items, class_="bars"), class_="card")


def interval(share: float, low: float, high: float) -> Markup:
    """Return a track from 0 to 1 with a dot at `share` and a whisker from `low` to `high`."""
    left, width = 100 * low, 100 * max(high - low, 0)
    return tag(
        "span",
        tag("i", style=f"left:{left:.1f}%;width:{width:.1f}%"),
        tag("b", style=f"left:{100 * share:.1f}%"),
        class_="interval",
        title=f"{percent(share)}, interval {percent(low)} to {percent(high)}",
    )
