"""What can go wrong, as types. The command line turns each into one line and an exit code."""


class DevclusterError(Exception):
    """A step failed; the message says which and where its log is. Exit code 1."""


class NoClusterPossible(DevclusterError):
    """This machine can have none of the kinds of cluster; the message is one line that says why. Exit code 3."""


class CommandFailed(DevclusterError):
    """A command ended with a non-zero status; the message carries the end of its output."""
