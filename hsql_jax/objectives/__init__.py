"""Policy objectives: compositions of small pure functions over rewards and log-probabilities."""

from hsql_jax.objectives.base import LossSum, Objective, Tokens
from hsql_jax.objectives.catalog import (
    OBJECTIVES,
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    resolve,
    rloo,
    sft,
    truncated,
    with_kl,
)
from hsql_jax.objectives.terms import (
    any_group,
    centred,
    clipped_loss,
    group_advantage,
    leave_one_out,
    mixed_group,
    ones,
    token_weights,
    trajectory_weights,
)

__all__ = [
    "OBJECTIVES",
    "LossSum",
    "Objective",
    "Tokens",
    "any_group",
    "centred",
    "cispo",
    "clipped_loss",
    "dapo",
    "dr_grpo",
    "group_advantage",
    "grpo",
    "gspo",
    "leave_one_out",
    "mixed_group",
    "ones",
    "resolve",
    "rloo",
    "sft",
    "token_weights",
    "trajectory_weights",
    "truncated",
    "with_kl",
]
