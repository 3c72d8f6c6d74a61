"""The one exception that a user's mistake raises."""


class UserError(Exception):
    """A mistake that the user can mend.

    The message names the key or ``file:line``, what was found and what to do. The command line prints it as
    it is,
    without a traceback, and ends with exit code 2.
    """
