"""The error of the launcher."""


class LaunchError(Exception):
    """A job that cannot be started; its text is one message for the user."""
