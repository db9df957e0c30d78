"""Environments to learn from, each a file that can be copied."""
