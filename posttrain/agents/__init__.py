"""Agents that bring their own loop: they talk to an OpenAI-compatible server, whose record becomes trajectories."""
