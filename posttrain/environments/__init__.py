"""Environments: conversations of several turns with the policy, with tools and rewards of their own."""
