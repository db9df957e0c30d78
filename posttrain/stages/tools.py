"""Tools of RL stages, made from the configuration."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.config import DatasetSection, Locator, OnlineSection, RLSection, ToolSection
from posttrain.data.chat import Renderer
from posttrain.data.sources import Rows, with_paths
from posttrain.data.tokenizer import Tokenizer
from posttrain.environments.tool_env import by_name
from posttrain.errors import ConfigError
from posttrain.stages.inputs import callable_of, rows_and_renderer
from posttrain.tools.formats.catalog import make_format
from posttrain.tools.function import FunctionTool
from posttrain.tools.mcp_server import McpServer
from posttrain.tools.prompts import ToolText
from posttrain.tools.types import FormatMaker, Tool


def tools_of(section: RLSection, *, servers: bool) -> list[Tool]:
    """Make the tools of a stage; `servers`: with those of MCP servers, which start to list them and end again.

    ConfigError for functions that cannot be tools, servers that do not start, and two tools of one name.
    """
    found = [tool for item in section.tools if servers or item.mcp is None for tool in _tools(item)]
    by_name(found)
    return found


def tools_and_schemas(section: OnlineSection) -> tuple[list[Tool], list[dict[str, Any]] | None]:
    """Tools of a stage, and the schemas that the prompts of all rows describe; None where each environment has tools of
    its own."""
    if not isinstance(section, RLSection):
        return [], None
    tools = tools_of(section, servers=True)
    answered = section.env is not None and section.env.fn is None
    return tools, [dict(tool.schema) for tool in tools] if answered else None


def format_maker(section: RLSection, tokenizer: Tokenizer) -> FormatMaker:
    """Maker of the format of tool calls of a stage."""
    return partial(make_format, section.tool_format, tokenizer)


def rows_with_tools(section: OnlineSection, dataset: DatasetSection, tokenizer: Tokenizer) -> tuple[Rows, Renderer]:
    """Rows and renderer of a dataset; it describes the tools of conversations where the chat template does not."""
    rows, renderer = rows_and_renderer(dataset, tokenizer)
    if isinstance(section, RLSection) and section.converses and renderer.chat:
        renderer = Renderer(tokenizer, True, ToolText(tokenizer, section.tool_format), rows.remarks)
    return rows, renderer


def _tools(item: ToolSection) -> Sequence[Tool]:
    if item.mcp is None:
        function = callable_of(item.fn, "tools.fn") if isinstance(item.fn, Locator) else item.fn
        if not callable(function):
            raise ConfigError(f"tools.fn={item.fn!r} is not a function; set file.py:function")
        at = item.fn if isinstance(item.fn, Locator) else Locator("tools")
        args = with_paths(function, at, item.args)
        return [FunctionTool(function, timeout_s=item.timeout_s, max_chars=item.max_chars, args=args)]
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError("tools.mcp needs the package mcp; run: pip install 'posttrain[mcp]'")
    given = item.mcp
    if unset := [name for name in given.env_from.values() if name not in os.environ]:
        raise ConfigError(f"tools.mcp.env_from: no environment variable {unset[0]} is set; set it where the run starts")
    env = given.env | {name: os.environ[source] for name, source in given.env_from.items()}
    server = McpServer(given.command, env, Path.cwd(), timeout_s=item.timeout_s, max_chars=item.max_chars)
    try:
        return server.tools()
    finally:
        server.close()
