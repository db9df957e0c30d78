"""What runs on the devices under the models and the losses."""

from posttrain.runtime.cpu import run_in_caller, seat_collectives

# Here, since whoever runs a model of ours has imported this before the first use of a device.
run_in_caller()
seat_collectives()
