"""Reward lab: what a reward function gives for answers whose right order is known, before anything trains on it."""
