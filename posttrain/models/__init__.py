"""The decoder of every family, its parts, and what they are configured by."""

from posttrain.host_memory import run_in_caller

# Here, since nobody who runs a model has used a device before this is imported, but for users of their own.
run_in_caller()
