"""The engine of the serving example stays short enough to be read."""

import ast
import io
import pathlib
import tokenize

import pytest

from examples.serving import engine

pytestmark = pytest.mark.host_only

FOLDER = pathlib.Path(engine.__file__).parent
EMPTY = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def test_size():
    """Of the engine and what it imports: not the server, checkpoints and the command line."""
    found, new = set[str](), {"engine"}
    while new:
        found |= new
        new = {name for module in new for name in imports_of(module)} - found
    assert {"attention", "block_manager", "model", "step"} < found
    assert sum(map(lines_of_code, found)) < 1000


def text_of(module):
    return (FOLDER / f"{module}.py").read_text()


def imports_of(module):
    nodes = ast.walk(ast.parse(text_of(module)))
    relative = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    return {name for node in relative for name in [node.module] if name} | {
        alias.name for node in relative if not node.module for alias in node.names
    }


def lines_of_code(module):
    """Without blank lines, comments and docstrings."""
    documented = {
        line
        for node in ast.walk(ast.parse(text_of(module)))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text_of(module)).readline)
    lines = {
        line
        for token in tokens
        if token.type not in EMPTY
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - documented)
