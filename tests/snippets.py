"""Python of documents, run so that it ends soon."""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import posttrain as pt
from posttrain import generation
from posttrain.results.result import RunResult
from posttrain.runs.check import check

ROWS = [
    {"prompt": f"{n}+1=", "question": f"{n}+1=", "completion": str(n + 1), "answer": str(n + 1), "text": f"{n}+1"}
    | {"chosen": str(n + 1), "rejected": str(n)}
    for n in range(8)
]

ENGINE = {"slots": 8, "max_length": 64, "decode_steps": 16}
"""Sizes of the page on engines, with which all text is generated: one program."""


@dataclass
class Checked(ast.NodeTransformer):
    """Rewrites a block so that it ends soon: `X.fit()` checks X; a checkpoint that is not here is a tiny one."""

    model: Path
    data: list[str] = field(default_factory=list)
    """Files of rows that the block names."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "fit" and isinstance(node.func, ast.Attribute):
            return ast.Call(ast.Name("_fit", ast.Load()), [node.func.value], [])
        if name in ("load_model", "load_tokenizer") and node.args and isinstance(node.args[0], ast.Constant):
            node.args[0] = ast.Constant(str(self.model))
        for keyword in node.keywords:
            if keyword.arg in ("model", "teacher") and isinstance(keyword.value, ast.Constant):
                keyword.value = ast.Constant(str(self.model))
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and re.fullmatch(r"[\w./-]+\.jsonl?", node.value):
            self.data.append(node.value)
        return node


def run_python(text: str, folder: Path, name: str = "block") -> dict[str, Any]:
    """Execute a block in a folder that `tests.documents.write_folder` made; the names that it leaves."""
    rewrite = Checked(folder / "runs" / "quickstart" / "0-sft" / "model")
    tree = ast.fix_missing_locations(rewrite.visit(ast.parse(text)))
    for file in rewrite.data:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        rows = "".join(json.dumps(row) + "\n" for row in ROWS) if file.endswith("l") else json.dumps(ROWS)
        (folder / file).write_text(rows)

    def fit(run: pt.SFT | pt.RL) -> RunResult:
        for file, rows in run._files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(rows)
        check(run.config)
        # What a run leaves, with a result that every evaluation has.
        result = {
            when: {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 8, "samples": [], "prompts": []}
            for when in ("before", "after")
        }
        (folder / "runs" / "quickstart" / "0-sft" / "result.json").write_text(json.dumps(result))
        return RunResult(output=folder / "runs" / "quickstart", stages=["0-sft"], trained=["0-sft"])

    def engine(model: pt.Decoder, **settings: Any) -> pt.NativeEngine:
        return pt.NativeEngine(model, **{**settings, **ENGINE})

    # A module of its own, where dataclasses look for the names of their annotations.
    module = sys.modules["document"] = ModuleType("document")
    vars(module)["_fit"] = fit
    with patch.multiple(generation, NativeEngine=engine, DEFAULT_NEW_TOKENS=8):
        exec(compile(tree, name, "exec", dont_inherit=True), vars(module))
    return vars(module)
