"""`hsql data inspect`: what it shows of a batch, on the console and as a page."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from samples import conversation
from test_records import trajectory, write

from hsql_jax.cli import main
from hsql_jax.data import Example, pack
from hsql_jax.inspect_data import Row, Run, Segment, console_text, describe, page

LETTERS = "_<b>&\x1b\nxyz"
EXAMPLES = [Example([1, 2, 3, 4, 5], [0, 0, 1, 1, 0]), Example([6, 7, 8, 9], [0, 1, 0, 1])]
ROW = Row(
    (
        Segment(5, 2, (Run("<b", False), Run(">&", True), Run("␛", False))),
        Segment(4, 2, (Run("\n", False), Run("x", True), Run("y", False), Run("z", True))),
    ),
    padding=3,
)


def test_a_batch_is_described_by_its_own_arrays() -> None:
    (batch,) = pack(EXAMPLES, length=12, rows=2)
    rows = describe(batch, lambda ids: "".join(LETTERS[i] for i in ids))
    assert rows == [ROW, Row((), padding=12)]


def test_the_console_marks_supervised_tokens_and_shades_segments() -> None:
    text = console_text({0: ROW}, {"Examples": "2"}, "Batch 0")
    assert (
        text.plain.split("\n\n")[1]
        == (
            "row 0\n-- segment 1: 5 tokens, 2 supervised --\n<b⟦>&⟧␛\n"
            "-- segment 2: 4 tokens, 2 supervised --\n\n⟦x⟧y⟦z⟧\n-- 3 padding tokens --"
        ).split("\n\n")[0]
    )
    assert text.plain.startswith("Batch 0\n  Examples: 2\n⟦supervised⟧ tokens train")
    assert text.plain.endswith("\n⟦x⟧y⟦z⟧\n-- 3 padding tokens --")
    styles = {text.plain[s.start : s.end]: str(s.style) for s in text.spans}
    assert styles["⟦>&⟧"] == "bold green on grey15"
    assert styles["<b"] == "on grey15"
    assert styles["⟦x⟧"] == "bold green"


def test_the_page_is_escaped_and_self_contained() -> None:
    html = page({0: ROW}, {"Examples": "2"}, "Batch 0 of <a>")
    assert "<pre>\n&lt;b<mark>&gt;&amp;</mark>␛</pre>" in html
    assert "<pre>\n\n<mark>x</mark>y<mark>z</mark></pre>" in html
    assert re.findall(r'<div class="(odd|even)">', html) == ["odd", "even"]
    assert "<h3>Segment 1: 5 tokens, 2 supervised</h3>" in html
    assert '<p class="padding">3 padding tokens</p>' in html
    assert "<title>Batch 0 of &lt;a&gt;</title>" in html
    assert not re.search(r"<script|src=|href=|url\(|@import|<b>", html)


@pytest.fixture
def arguments(tmp_path: Path, tiny_folder: Path) -> list[str]:
    path = write(tmp_path / "a.jsonl", *(trajectory(seed).model_dump() for seed in range(4)))
    sizes = ["--data.row-tokens", "4000", "--data.rows", "1"]
    return ["data", "inspect", "--data.path", str(path), "--tokenizer", str(tiny_folder), *sizes]


def test_the_verb_shows_every_turn_of_the_batch(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "  Examples: 4\n" in shown
    found = [seed for seed in range(4) if conversation(seed)[1].content in shown]
    assert found
    for seed in found:
        for message in conversation(seed):
            if message.role == "assistant":
                assert f"⟦{message.content}<|im_end|>⟧" in shown
    assert re.search(r"-- segment 1: [\d,]+ tokens, [\d,]+ supervised --", shown)
    assert re.search(r"-- [\d,]+ padding tokens --", shown)


def test_the_verb_writes_a_page(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "batch.html"
    assert main([*arguments, "--html", str(file), "--row", "0"]) == 0
    assert capsys.readouterr().out == f"Batch 0 of {tmp_path / 'a.jsonl'}: {file}\n"
    marked = [unescape(text) for text in re.findall(r"<mark>(.*?)</mark>", file.read_text(), re.S)]
    own = {f"{m.content}<|im_end|>" for s in range(4) for m in conversation(s) if m.role[0] == "a"}
    assert marked[0] == "Supervised"  # the legend
    assert len(marked) > 1
    assert set(marked[1:]) <= own


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--batch", "99"], "batch 99: an epoch has"),
        (["--tokenizer", "nowhere"], "nowhere: no tokenizer.json there"),
        (["--data.path", "nowhere.jsonl"], "nowhere.jsonl: no records there"),
        (["--html", "/dev/null/a.html"], "/dev/null/a.html: File exists"),
    ],
)
def test_what_the_user_can_mend(
    more: list[str], problem: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *more]) == 2
    assert capsys.readouterr().err.startswith(f"hsql: error: {problem}")
