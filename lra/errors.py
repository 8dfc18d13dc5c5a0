"""The one error a user can mend."""


class UsageError(Exception):
    """Bad input: one line that says what is wrong and how to mend it.

    The command line prints it without a traceback and exits with code 2.
    """
