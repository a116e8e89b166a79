"""`hsql data inspect`: a batch as the loss sees it, on the console or as one HTML page.

Shown is what the arrays of the batch say, not the records that it came from: a token is marked
where the loss mask weighs it as a target, a segment ends where its id does, and what is left of a
row is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from hsql_env.analysis.markup import Markup, number, percent, table, tag
from hsql_jax.chat import ChatRenderer, load_tokenizer
from hsql_jax.config import option
from hsql_jax.data import Batch, BatchStream
from hsql_jax.data.config import DataConfig, open_stream
from hsql_jax.errors import UserError

Decode = Callable[[Sequence[int]], str]

SHADES = ("", "on grey15")  # of segments, in turn
SUPERVISED = "bold green"
OPEN, CLOSE = "⟦", "⟧"  # around supervised tokens, where there is no colour
LEGEND = f"{OPEN}supervised{CLOSE} tokens train; segments of a row do not see each other."
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
STYLE = """
:root { color-scheme: light dark; --a: #fff; --b: #eef1f6; --ink: #1c1f24; --soft: #5f6670;
  --mark: #c5ecd1; }
@media (prefers-color-scheme: dark) { :root { --a: #14161a; --b: #20242c; --ink: #e8eaed;
  --soft: #9da5b0; --mark: #1d5434; } }
body { margin: 0 auto; max-width: 1120px; padding: 2rem 1.25rem; background: var(--a);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
pre { margin: 0; padding: .5rem .75rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.5 ui-monospace, monospace; }
h3 { margin: 0; padding: .5rem .75rem 0; font-size: .8rem; font-weight: 500; }
h3, .padding, caption { color: var(--soft); }
.odd { background: var(--a); } .even { background: var(--b); }
.padding { padding: .5rem .75rem; border: 1px dashed var(--soft); }
mark { background: var(--mark); color: inherit; border-radius: 2px; }
table { border-collapse: collapse; } th, td { padding: .2rem 1rem .2rem 0; text-align: left; }
caption { text-align: left; } td { font-variant-numeric: tabular-nums; }
"""


@dataclass(frozen=True)
class InspectConfig:
    """Which batch to show, and where."""

    data: DataConfig
    tokenizer: Path  # a folder with tokenizer.json
    thinking: bool | None = None  # whether the policy reasons; None: a chat without think blocks
    batch: int = 0  # of the epoch, from 0
    row: int | None = None  # of the batch, from 0; None: all
    html: Path | None = option(None)  # a file to write, instead of the console

    def __post_init__(self) -> None:
        if self.batch < 0 or (self.row is not None and not 0 <= self.row < self.data.rows):
            raise ValueError(
                f"batch = {self.batch}, row = {self.row}: a batch from 0, and a row of it from 0 "
                f"to {self.data.rows - 1}"
            )


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a segment that are all supervised, or all not."""

    text: str
    supervised: bool


@dataclass(frozen=True)
class Segment:
    """One example in a row."""

    tokens: int
    supervised: int
    runs: tuple[Run, ...]

    @property
    def title(self) -> str:
        """Its counts in words."""
        return f"{self.tokens:,} tokens, {self.supervised:,} supervised"


@dataclass(frozen=True)
class Row:
    """A row of a batch: its segments, and the count of padding tokens after them."""

    segments: tuple[Segment, ...]
    padding: int


def main(config: InspectConfig) -> None:
    """Show one batch. Raises `UserError` where the data or the tokenizer cannot be read."""
    try:
        tokenizer = load_tokenizer(config.tokenizer)
    except FileNotFoundError as error:
        raise UserError(str(error)) from None
    backend = tokenizer.backend_tokenizer
    stream = open_stream(config.data, ChatRenderer(tokenizer, config.thinking), epochs=1)
    if config.batch >= stream.steps_per_epoch:
        raise UserError(f"batch {config.batch}: an epoch has {stream.steps_per_epoch}, from 0")
    batch = next(islice(stream, config.batch, None))
    rows = describe(batch, lambda ids: backend.decode(ids, skip_special_tokens=False))
    shown = dict(enumerate(rows) if config.row is None else [(config.row, rows[config.row])])
    title = f"Batch {config.batch} of {config.data.path}"
    if config.html is None:
        Console(soft_wrap=True).print(console_text(shown, facts(stream), title))
        return
    try:
        config.html.parent.mkdir(parents=True, exist_ok=True)
        config.html.write_text(page(shown, facts(stream), title), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{config.html}: {error.strerror}; give another file to --html") from None
    print(f"{title}: {config.html}")


def describe(batch: Batch, decode: Decode) -> list[Row]:
    """The rows of a packed batch, as text."""
    supervised = np.zeros(batch.tokens.shape, bool)
    supervised[:, 1:] = batch.loss_mask[:, :-1] > 0  # a weight belongs to the target, one ahead
    rows = []
    for tokens, own, ids in zip(batch.tokens, supervised, batch.segment_ids, strict=True):
        places = [np.flatnonzero(ids == segment) for segment in range(1, int(ids.max()) + 1)]
        segments = tuple(_segment(tokens[place], own[place], decode) for place in places)
        rows.append(Row(segments, int(np.sum(ids == 0))))
    return rows


def _segment(tokens: np.ndarray, supervised: np.ndarray, decode: Decode) -> Segment:
    edges = np.flatnonzero(np.diff(supervised)) + 1
    runs = [
        Run(decode(ids.tolist()).translate(PICTURES), bool(own[0]))
        for ids, own in zip(np.split(tokens, edges), np.split(supervised, edges), strict=True)
    ]
    return Segment(len(tokens), int(supervised.sum()), tuple(runs))


def facts(stream: BatchStream) -> dict[str, str]:
    """What became of the examples and how full the rows are, by name."""
    counts = stream.counts
    return {
        "Examples": number(counts.kept),
        "Longer than a row, left out": number(counts.too_long),
        "Longer than a row, cut at a turn": f"{counts.cut:,} ({counts.tokens_cut:,} tokens lost)",
        "Nothing to learn, left out": number(counts.without_policy_tokens),
        "Tokens an epoch": number(stream.tokens_per_epoch),
        "Supervised tokens an epoch": number(stream.policy_tokens_per_epoch),
        "Batches an epoch": number(stream.steps_per_epoch),
        "Rows filled": percent(stream.fill),
    }


def console_text(rows: Mapping[int, Row], counts: Mapping[str, str], title: str) -> Text:
    """The rows in colour; brackets show the supervised tokens where there is none."""
    lines = [title, *(f"  {name}: {value}" for name, value in counts.items()), LEGEND]
    text = Text("\n".join(lines))
    for index, row in rows.items():
        text.append(f"\n\nrow {index}", "bold")
        for place, segment in enumerate(row.segments, 1):
            text.append(f"\n-- segment {place}: {segment.title} --\n", "dim")
            for piece, style in _pieces(segment):
                text.append(piece, f"{style} {SHADES[place % 2]}".strip())
        text.append(f"\n-- {row.padding:,} padding tokens --", "dim")
    return text


def _pieces(segment: Segment) -> Iterator[tuple[str, str]]:
    for run in segment.runs:
        yield (f"{OPEN}{run.text}{CLOSE}", SUPERVISED) if run.supervised else (run.text, "")


def page(rows: Mapping[int, Row], counts: Mapping[str, str], title: str) -> str:
    """One HTML page without anything outside it; every text of the data is escaped."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    legend = tag("p", tag("mark", "Supervised"), " tokens train; shades tell segments apart.")
    body = tag(
        "body",
        tag("h1", title),
        table(("", ""), counts.items(), "Counts"),
        legend,
        *(_row_section(index, row) for index, row in rows.items()),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _row_section(index: int, row: Row) -> Markup:
    segments = [
        tag(
            "div",
            tag("h3", f"Segment {place}: {segment.title}"),
            tag(
                "pre",
                "\n",
                *(tag("mark", r.text) if r.supervised else r.text for r in segment.runs),
            ),
            class_="odd" if place % 2 else "even",
        )
        for place, segment in enumerate(row.segments, 1)
    ]  # a line break right after <pre> is not shown: the text's own, if any, follows it
    padding = tag("p", f"{row.padding:,} padding tokens", class_="padding")
    return tag("section", tag("h2", f"Row {index}"), *segments, padding)
