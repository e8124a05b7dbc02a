"""The error of the launcher."""


class LaunchError(Exception):
    """A job cannot be started. The text is a message for the user."""
