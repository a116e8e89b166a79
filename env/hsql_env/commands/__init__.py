"""The commands of `hsql-env`, one module each: its arguments as a dataclass, and `run`."""


class CommandError(RuntimeError):
    """A command that cannot go on; the message is what the user reads."""
