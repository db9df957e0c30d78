"""Kernels: attention, grouped matrix products, token statistics; selection per platform."""

from posttrain.runtime.cpu import run_in_caller, seat_collectives

# Set up here because every model imports this package before the first device is used.
run_in_caller()
seat_collectives()
