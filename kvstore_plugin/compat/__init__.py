"""MXNet as this package needs it: differences between releases, arrays, errors, the engine."""
