"""What `hsql check-objective` checks when nothing is named."""

from __future__ import annotations

from hsql_jax.check_objective import CheckConfig


def objective() -> CheckConfig:
    """The demo's own."""
    return CheckConfig("dapo")
