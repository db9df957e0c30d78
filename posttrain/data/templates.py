"""Chat templates as texts: their marks of assistant turns, and the time that they see."""

from __future__ import annotations

import re
from datetime import datetime

from posttrain.user_code import import_transformers

GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


def marks_generation(template: str) -> bool:
    """Tell whether a chat template marks assistant turns with `{% generation %}`, ignoring its comments."""
    return GENERATION_MARKER.search(COMMENT.sub("", template)) is not None


def at_time(clock: datetime | None, template: str) -> str:
    """Chat template whose `strftime_now` writes a fixed time, for the rendering that follows."""
    if clock is None or "strftime_now" not in template:
        return template
    # The library compiles each text once: with the comment this one has globals of its own.
    template = f"{{# {clock.isoformat()} #}}\n{template}"
    compiled = import_transformers("utils.chat_template_utils")._compile_jinja_template(template)
    compiled.globals["strftime_now"] = clock.strftime
    return template
