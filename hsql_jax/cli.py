"""The `hsql` command: chooses a program, builds its config, runs it, and reports what went wrong.

Programs are imported only once their config is complete, so `hsql --help` does not wait for JAX.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from hsql_jax import __version__
from hsql_jax.errors import UserError

INTERRUPTED = 128 + signal.SIGINT  # the shell's status for a process ended by Ctrl-C
TERMINATED = 128 + signal.SIGTERM
UNREAD = 128 + signal.SIGPIPE  # who read the output has gone, as `head` does


@dataclasses.dataclass(frozen=True)
class Verb:
    """A program of the command line, of one word or two: `module` has `main(config)`."""

    summary: str
    module: str
    config: str  # where the defaults come from, FILE.py:FUNCTION
    config_with: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other defaults where an option is given: option -> FILE.py:FUNCTION."""


VERBS: Mapping[str, Verb] = {
    "demo": Verb(
        "The whole loop in minutes on a CPU: databases, tasks, teacher, SFT, RL, evaluation.",
        "hsql_jax.demo",
        "configs/demo.py:demo",
        {"--databases": "configs/demo.py:own_databases"},
    ),
    "sft": Verb(
        "Supervised training on a file of conversations, on any mesh; resumable.",
        "hsql_jax.finetune",
        "configs/sft.py:tiny",
    ),
    "rl": Verb(
        "Policy optimisation with rollouts in the environment service; resumable.",
        "hsql_jax.reinforce",
        "configs/rl.py:tiny_cpu",
    ),
    "compile": Verb(
        "What a model needs on a machine that need not be there: memory, traffic, time.",
        "hsql_jax.compile",
        "configs/compile.py:tiny",
    ),
    "check-objective": Verb(
        "Whether an objective, your own too, holds to what every objective must.",
        "hsql_jax.check_objective",
        "configs/checks.py:objective",
    ),
    "data inspect": Verb(
        "A batch as the loss sees it: supervised tokens, segments, padding, counts.",
        "hsql_jax.inspect_data",
        "configs/data.py:demo_corpus",
    ),
}


def main(arguments: Sequence[str] | None = None, verbs: Mapping[str, Verb] = VERBS) -> int:
    """Run `hsql ARGUMENTS` (default: the process's own) and return its exit status.

    0: done; 2: the user's to mend, one line on stderr; 130: interrupted, with the command that
    continues. A programming error keeps its traceback.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with _children_end_with_us():
            _dispatch(arguments, verbs)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return UNREAD
    except KeyboardInterrupt:
        print(f"\nhsql: interrupted; to continue: {_resume_command(arguments)}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if not _is_users(error):
            raise
        print(f"hsql: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _dispatch(arguments: Sequence[str], verbs: Mapping[str, Verb]) -> None:
    words = 2 if " ".join(arguments[:2]) in verbs else 1  # such as `data inspect`
    name, rest = " ".join(arguments[:words]) or "--help", arguments[words:]
    if name in ("-h", "--help"):
        print(_usage(verbs))
    elif name == "--version":
        print(f"hsql {__version__}")
    elif name in verbs:
        verb = verbs[name]
        config = _config(name, verb, rest)
        importlib.import_module(verb.module).main(config)
    else:
        near = difflib.get_close_matches(name, verbs, n=1, cutoff=0.0)
        raise UserError(f"no verb {name!r}; did you mean `hsql {near[0]}`? See `hsql --help`")


def _usage(verbs: Mapping[str, Verb]) -> str:
    width = max(map(len, verbs))
    lines = [f"  {name:<{width}}  {verb.summary}" for name, verb in verbs.items()]
    return "\n".join(
        [
            "usage: hsql VERB [--config FILE.py:FUNCTION] [OPTIONS]",
            "",
            *lines,
            "",
            "`hsql VERB --help` lists the options of a verb with their defaults.",
        ]
    )


def _config(name: str, verb: Verb, arguments: Sequence[str]) -> Any:
    """The verb's config: from `--config` or the verb's own file, then the overrides."""
    from hsql_jax.config import load_config, override

    parser = argparse.ArgumentParser(prog=f"hsql {name}", add_help=False, allow_abbrev=False)
    given = {argument.partition("=")[0] for argument in arguments}
    default = next((verb.config_with[o] for o in verb.config_with if o in given), verb.config)
    parser.add_argument("--config", default=default, metavar="FILE.py:FUNCTION")
    chosen, overrides = parser.parse_known_args(arguments)
    description = (
        f"{verb.summary}\n\nThe defaults below are those of {chosen.config}; "
        "take others with --config FILE.py:FUNCTION."
    )
    return override(load_config(chosen.config), overrides, f"hsql {name}", description)


def _is_users(error: Exception) -> bool:
    """Ours and those of the text half, whose error types all carry a line for the user."""
    return isinstance(error, UserError) or type(error).__module__.startswith("hsql_env.")


def _resume_command(arguments: Sequence[str]) -> str:
    again = [*arguments] if "--resume" in arguments else [*arguments, "--resume"]
    called = sys.argv[0] if Path(sys.argv[0]).name == "hsql" else "hsql"
    return shlex.join(["hsql" if shutil.which("hsql") else called, *again])


@contextmanager
def _children_end_with_us() -> Iterator[None]:
    """Whatever ends the block, a `kill` too, its `with` statements unwind and no worker is left."""

    def unwind(signum: int, frame: object) -> NoReturn:
        raise SystemExit(TERMINATED)

    previous = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()
        signal.signal(signal.SIGTERM, previous)
