"""Errors that are the user's to mend."""


class UserError(ValueError):
    """One clear line: what is wrong, where, what to do. The command line prints it and exits."""
