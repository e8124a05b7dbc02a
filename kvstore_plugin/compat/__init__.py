"""MXNet as this package needs it: what differs between its releases, arrays, errors, the engine."""
