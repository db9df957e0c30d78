"""Formats of tool calls, by the families of models that write them."""
