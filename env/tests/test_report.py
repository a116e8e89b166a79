"""The report: what it shows, that it escapes everything, and that it reaches for nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from hsql_env.analysis.charts import bars, bin_means, line_chart, smooth, ticks
from hsql_env.analysis.episodes import highlight, pick_episodes, render_episode
from hsql_env.analysis.markup import Markup, duration, label, number, percent, tag
from hsql_env.analysis.report import render_report
from hsql_env.records import Call, Message, PublicTask, Trajectory, Verdict

EVIL = "<script>alert('x')</script> & \"q\""
ESCAPED = "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;q&quot;"


def score(accuracy: float) -> dict[str, Any]:
    return {"accuracy": accuracy, "tasks": 512, "interval": [accuracy - 0.04, accuracy + 0.04]}


def make_summary() -> dict[str, Any]:
    rates = {"invalid_call": {"value": 0.125, "numerator": 64, "denominator": 512, "of": "x"}}
    sft = {"greedy": score(0.59), "t1": score(0.305), "t05": score(0.53), "behaviour": rates}
    sft["behaviour_t1"] = {
        "invalid_call": rates["invalid_call"] | {"value": 0.25, "numerator": 128}
    }
    return {
        "stages": {
            "base": {"unseen": {"greedy": score(0.04)}, "seen": {"greedy": score(0.05)}},
            "sft": {"unseen": sft},
        },
        "seed": 7,
        "wall_seconds": {"sft": 188.0, "evaluation": 71.5},
        "changes": [
            {
                "before": "base",
                "after": "sft",
                "split": "unseen",
                "decoding": "t05",
                "mean": -0.012,
                "low": -0.03,
                "high": 0.006,
            }
        ],
        "data": {
            "databases": 1524,
            "survival": {"execution": 15480, EVIL: 3},
            "tasks_by_family": {"join_count": {"train": 1101, "unseen": 80}},
        },
        "overlap": {"shared_sql": 0, "held_out_tasks": 1024},
    }


def make_trajectory(reward: float = 1.0, failed: bool = False, question: str = "?") -> Trajectory:
    broken = Call(turn=1, tool="sql_exec", outcome="failed", sql="SELECT x")
    right = Call(turn=2, tool="sql_submit", outcome="ok", sql="SELECT 'a<b'")
    return Trajectory(
        trajectory_id="x",
        task=PublicTask(task_id="t", database_id="harbour", question=question),
        policy="p",
        seed=0,
        messages=(
            Message(role="system", content="the system prompt"),
            Message(role="user", content=question),
            Message(role="assistant", content="I look first.<tool_call>{}</tool_call>"),
            Message(role="tool", content="Error: no such column: x"),
            Message(role="assistant", content="<tool_call>{}</tool_call>"),
            Message(role="tool", content="ACCEPTED"),
        ),
        calls=(broken, right) if failed else (right,),
        turns=2,
        final_sql="SELECT 'a<b'",
        terminated=True,
        truncated=False,
        verdict=Verdict(
            result_ok=reward > 0, protocol_ok=True, strict_ok=True, reward=reward, submitted=True
        ),
    )


def make_report() -> str:
    series = [
        {"stage": stage, "step": step, "values": {"loss": 1 / (step + 1), "tokens_per_s": None}}
        for stage in ("warmup", "sft")
        for step in range(5)
    ]
    episodes = {"sft": [make_trajectory(question=EVIL, failed=True)], "rl": []}
    return render_report(make_summary(), series, episodes, title=EVIL)


class Outline(HTMLParser):
    """Collects the tags that are open at the end, and every section's heading."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def test_the_page_is_well_formed_and_has_every_section() -> None:
    outline = Outline(make_report())
    assert outline.open == []
    assert outline.headings == [
        "Accuracy",
        "Changes",
        "Behaviour",
        "Learning",
        "Data",
        "Held-out overlap",
        "Time",
        "Episodes",
    ]


def test_every_text_of_the_input_is_escaped_and_nothing_outside_is_asked_for() -> None:
    page = make_report()
    assert "<script" not in page
    assert page.count(ESCAPED) == 4  # title, heading, a survival layer, a question
    assert not re.search(r"https?:|url\(|@import|src=", page)
    assert not Outline(page).tags & {"script", "link", "img", "iframe"}


@pytest.mark.parametrize(
    "shown",
    [
        "<strong>59.0 %</strong>",
        "55.0 % – 63.0 %",
        "T = 0.5",
        "T = 1.0",
        "<small>64 / 512</small>",
        "−1.2",
        "−3.0 to +0.6",
        '<span class="badge plain">no significant change</span>',
        "15,480",
        '<th scope="row">Join count</th><td>1,101</td><td>80</td>',
        "<dt>Shared SQL</dt><dd>0</dd>",
        "3 min 08 s",
        "seed 7 · 4 min 20 s in all",
        'aria-label="Loss: 1 at first, 0.2 at the end, by step"',
        "<h3>Warm-up</h3>",
    ],
)
def test_numbers_are_shown(shown: str) -> None:
    assert shown in make_report()


def test_decodings_are_in_order_and_unseen_databases_come_first() -> None:
    page = make_report()
    places = [page.index(f"<td>{words}</td>") for words in ("Greedy", "T = 0.5", "T = 1.0")]
    assert places == sorted(places)
    assert page.index("<caption>Unseen databases") < page.index("<caption>Seen databases")
    assert "Tokens per second" not in page  # null in every row


def test_an_empty_run_has_a_page_without_sections() -> None:
    outline = Outline(render_report({}, [], {}))
    assert (outline.open, outline.headings) == ([], [])


def test_an_episode_shows_prose_calls_errors_and_the_verdict() -> None:
    episode = render_episode(make_trajectory(failed=True))
    assert '<span class="badge good">✓ correct</span>' in episode
    assert "<p>I look first.</p>" in episode
    assert '<div class="bubble tool error"><h5>error</h5><pre>Error: no such column' in episode
    assert '<span class="string">&#x27;a&lt;b&#x27;</span>' in episode
    assert "system prompt" not in episode
    wrong = render_episode(make_trajectory(reward=0))
    assert '<span class="badge bad">✗ wrong result</span>' in wrong
    assert "turn without a readable call</h5><pre>I look first.&lt;tool_call&gt;" in wrong


def test_picked_episodes_differ_in_kind() -> None:
    straight, wrong, recovered = (
        make_trajectory(),
        make_trajectory(reward=0),
        make_trajectory(failed=True),
    )
    assert pick_episodes([straight, straight, wrong, recovered]) == [recovered, straight, wrong]
    other = make_trajectory(question="another")
    assert pick_episodes([straight, other, wrong], count=5) == [straight, wrong, other]


def test_highlighting_keeps_the_text() -> None:
    sql = "select \"from\", 'it''s' FROM t1 WHERE a>=2.5"
    marked = highlight(sql)
    assert re.sub(r"<[^>]+>", "", marked) == str(tag("i", sql)).removeprefix("<i>")[:-4]
    kinds = re.findall(r'class="(\w+)"', marked)
    assert kinds == ["keyword", "name", "string", "keyword", "keyword", "number"]


def test_markup_is_escaped_once_and_attributes_too() -> None:
    assert tag("b", "<", Markup("<i/>"), None, class_='"', hidden=True, id=None) == (
        '<b class="&quot;" hidden>&lt;<i/></b>'
    )


def test_words_for_numbers() -> None:
    assert [number(n) for n in (1234, 0.12345, 12345.6, 2.0)] == ["1,234", "0.123", "12,346", "2"]
    assert [percent(None), percent(0.12345)] == ["–", "12.3 %"]
    assert [duration(s) for s in (8.24, 59.99, 60, 7620)] == [
        "8.2 s",
        "60.0 s",
        "1 min 00 s",
        "2 h 07 min",
    ]
    assert label("shared_sql_ids") == "Shared SQL ids"


def test_ticks_enclose_the_range_with_round_numbers() -> None:
    assert ticks(0, 4.1) == [0, 2, 4, 6]
    assert ticks(0, 0.93) == [0, 0.5, 1]
    assert ticks(-0.04, 0.05) == [-0.05, 0, 0.05]
    assert ticks(3, 3) == [3, 4]


def test_curves_keep_their_mean_when_thinned() -> None:
    points = [(float(x), float(x % 2)) for x in range(8)]
    assert bin_means(points, 4) == [(0.5, 0.5), (2.5, 0.5), (4.5, 0.5), (6.5, 0.5)]
    assert smooth(points[:3], 3) == [(0, 0.5), (1, pytest.approx(1 / 3)), (2, 0.5)]


def test_a_line_chart_draws_its_points_to_scale() -> None:
    chart = line_chart("Loss", [(0, 0), (10, 4)])
    assert 'd="M40.0 166.0L330.0 10.0"' in chart
    assert "4 at step 10" in chart


def test_bars_are_scaled_to_the_largest() -> None:
    html = bars({"a": 50, "b": 200}, "c")
    assert re.findall(r"width:([\d.]+)%", html) == ["25.0", "100.0"]
    assert "width:0.0%" in bars({"a": 0}, "c")


def test_a_stopped_rl_stage_is_marked() -> None:
    stopped = render_report(make_summary() | {"rl_stopped": f"no reward {EVIL}"}, [], {})
    note = "RL was stopped: no reward"
    assert note in stopped
    assert EVIL not in stopped
    assert note not in make_report()


def test_behaviour_is_shown_greedy_and_sampled() -> None:
    before, _, sampled = make_report().partition("Behaviour on held-out tasks, T = 1")
    greedy = before.partition("Behaviour on held-out tasks, greedy")[2]
    assert "12.5 %" in greedy
    assert "25.0 %" not in greedy
    assert "25.0 %" in sampled
