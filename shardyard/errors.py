"""The one exception that a user's mistake raises; what others say, in a line; exit codes with a meaning."""

EXIT_SAVED = 75
"""Exit code of a run that saved and stopped because it was asked to: sysexits.h's EX_TEMPFAIL, try again."""


class UserError(Exception):
    """A mistake that the user can mend.

    The message names the key or ``file:line``, what was found and what to do. The command line prints it as
    it is, without a traceback, and ends with exit code 2.
    """


def first_line(error: BaseException) -> str:
    """The first line of what an error says; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def opening(error: BaseException) -> str:
    """The first line of what an error says, and the second where the first only announces it with a colon, as
    those of config classes do; "" where it says nothing.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
