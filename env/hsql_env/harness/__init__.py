"""The action contract: tools, observations, the episode's state machine, the verdict."""

from hsql_env.harness.actions import InfrastructureError
from hsql_env.harness.episode import Episode, EpisodeConfig, EpisodeOver, StepResult
from hsql_env.harness.parse import ParsedCall, ParsedTurn, parse_turn
from hsql_env.harness.tools import SYSTEM_PROMPT, TOOL_NAMES, TOOLS
from hsql_env.harness.verify import OracleError, Verifier

__all__ = [
    "SYSTEM_PROMPT",
    "TOOLS",
    "TOOL_NAMES",
    "Episode",
    "EpisodeConfig",
    "EpisodeOver",
    "InfrastructureError",
    "OracleError",
    "ParsedCall",
    "ParsedTurn",
    "StepResult",
    "Verifier",
    "parse_turn",
]
