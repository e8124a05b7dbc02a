"""Of nose's plugins, the two that MXNet's tests import."""
