"""GRPO of a peer's driver with another number of new tokens, for `bench/rl.py`; in the Python of the peer.

python bench/peers/rl_peer.py FOLDER DRIVER --new N --steps N
"""

from __future__ import annotations

import argparse
import importlib
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("driver")
    parser.add_argument("--new", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.folder)
    common, driver = importlib.import_module("common"), importlib.import_module(arguments.driver)
    common.WORK["grpo"]["new"] = arguments.new
    driver.run("grpo", "s1", arguments.steps, {})


if __name__ == "__main__":
    main()
