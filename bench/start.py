"""The environment as this process found it; to be imported before posttrain, which adds to `XLA_FLAGS` for itself."""

from __future__ import annotations

import os

AT_START = dict(os.environ)
