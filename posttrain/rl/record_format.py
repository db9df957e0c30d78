"""Format of the records of trajectories: names of columns and of metadata, without anything heavy to import."""

from __future__ import annotations

import numpy as np

FORMAT = 3
META = "posttrain"
"""Key of the description of the step in a file's metadata."""
TOKENS = {"tokens": np.int32, "sampled": np.bool_, "logps": np.float32, "kept_logps": np.float32, "versions": np.int32}
"""Columns with a value for each token: 17 bytes before compression."""
REWARD = "rewards."
"""Prefix of the columns of single reward functions."""
