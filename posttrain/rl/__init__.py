"""Building blocks of reinforcement learning, public as `pt.rl`."""

from posttrain.rl.advantages import batch_scaled, centered, leave_one_out, standardized
from posttrain.rl.agreement import EXACT, ROUNDED, SamplerGate, check_agreement
from posttrain.rl.assemble import assemble
from posttrain.rl.by_hand import make_batch, make_examples, make_rubric, make_sampler, sample, score
from posttrain.rl.sampler import IssuedGroup, Sampler, collect

__all__ = [
    "EXACT",
    "ROUNDED",
    "IssuedGroup",
    "Sampler",
    "SamplerGate",
    "assemble",
    "batch_scaled",
    "centered",
    "check_agreement",
    "collect",
    "leave_one_out",
    "make_batch",
    "make_examples",
    "make_rubric",
    "make_sampler",
    "sample",
    "score",
    "standardized",
]
