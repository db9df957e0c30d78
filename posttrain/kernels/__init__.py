"""Kernels: attention, grouped matrix products, token statistics; selection per platform."""

from posttrain.runtime.xla import disable_async_dispatch, reserve_collective_threads

# Set up here because every model imports this package before the first device is used.
disable_async_dispatch()
reserve_collective_threads()
