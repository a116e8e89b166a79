"""How long the campaign runs: few examples, always the same, or HSQL_FUZZ_EXAMPLES new ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

ASKED = os.environ.get("HSQL_FUZZ_EXAMPLES")
EXAMPLES = int(ASKED or 60)

patient = pytest.mark.timeout(60 + EXAMPLES)  # a long campaign's tests take their time

T = TypeVar("T")


def bounded(examples: int = EXAMPLES) -> Callable[[Any], Any]:
    """Return Hypothesis's settings; a failure of a long campaign prints how to repeat it."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=not ASKED,
        print_blob=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most so many of the items, evenly spread over them."""
    count = min(most, len(items))
    return [items[index * len(items) // count] for index in range(count)]
