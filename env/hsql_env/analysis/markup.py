"""HTML that is safe by construction: text is escaped unless it already is `Markup`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape


class Markup(str):
    """Text that is HTML already; only this module makes it from something else."""

    __slots__ = ()


ACRONYM = re.compile(r"\b(?:sql|sft|rl|id)\b")
VOID = frozenset({"meta", "rect", "circle", "line", "path"})  # elements written without an end


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return `<name attributes>children</name>`, with every text escaped.

    An underscore in an attribute's name becomes a hyphen, one at its end is dropped (`class_`);
    None leaves a child or an attribute out, True writes an attribute without a value.
    """
    opening = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Markup(f"<{opening}/>")
    return Markup(f"<{opening}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Markup:
    """Return the children one after the other, escaped where they are not `Markup`."""
    return Markup("".join(text(child) for child in children if child is not None))


def text(value: object) -> Markup:
    """Return the value as HTML text."""
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def table(head: Sequence[object], rows: Iterable[Sequence[object]], caption: str) -> Markup:
    """Return a table that scrolls sideways on a narrow screen; the first column heads its row."""
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:]))
        for row in rows
    ]
    whole = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))),
        tag("tbody", *body),
    )
    return tag("div", whole, class_="scroll", role="region", aria_label=caption, tabindex=0)


def label(key: str) -> str:
    """Return a key of a record as words: `shared_sql` becomes `Shared SQL`."""
    words = ACRONYM.sub(lambda match: match[0].upper(), key.replace("_", " "))
    return words[:1].upper() + words[1:]


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share as a percentage, a dash where there is none."""
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def number(value: float) -> str:
    """Return a number briefly: whole ones with separators, others with three digits."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return seconds as `12.3 s`, `4 min 05 s` or `2 h 07 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
