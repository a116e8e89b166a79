"""Every disagreement with a recorded verdict has a rule, and the committed table is today's."""

from __future__ import annotations

from comparer_pairs import PAIRS, TABLE, UNEXPLAINED, judge_all, render
from shared_data import FOLDER, need


def test_the_table_is_reproduced() -> None:
    need(PAIRS)
    judged, missing = judge_all(FOLDER)
    assert [pair.line for pair in judged if UNEXPLAINED in pair.rules.values()] == []
    assert render(judged, missing) == TABLE.read_text(encoding="utf-8")
