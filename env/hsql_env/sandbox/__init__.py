"""One SQL statement, safely: guard, authorizer, limits, worker processes."""

from hsql_env.sandbox.pool import SandboxPool
from hsql_env.sandbox.types import (
    Execution,
    Failure,
    FailureKind,
    GuardProfile,
    Limits,
    Row,
    Table,
    Value,
)

__all__ = [
    "Execution",
    "Failure",
    "FailureKind",
    "GuardProfile",
    "Limits",
    "Row",
    "SandboxPool",
    "Table",
    "Value",
]
