"""Agents that bring their own loop: they talk to an OpenAI-compatible endpoint, whose record becomes trajectories."""
