"""Sphinx configuration; `make docs` builds the site."""

import re
from typing import Any

import jaxkv

project = "jaxkv"
author = "The jaxkv authors"
version = release = jaxkv.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"jaxkv {release}"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings give shapes and dtypes
napoleon_numpy_docstring = False
napoleon_use_ivar = True

REPOSITORY = "https://github.com/jaxkv/jaxkv/blob/main"
MARKUP = re.compile(
    r"`{1,2}([^`]+)`{1,2}(\w?)|(?<![\w*])(\*{1,2})(?=\w)"
)  # code, or the stars of *args


def link_to_repository(app: Any, page: str, source: list[str]) -> None:
    """Redirects links that leave docs/ (sources, records) to the repository."""
    source[0] = source[0].replace("](../", f"]({REPOSITORY}/")


def markdown_to_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: Any) -> None:
    """Code, code blocks, tables and *args of docstrings, which are written as in Markdown."""
    blocks = MARKUP.sub(markup_to_rst, "\n".join(lines)).split("\n\n")
    before = " "
    for i, block in enumerate(blocks):
        if block.startswith("|"):
            blocks[i] = "::\n\n" + re.sub("^", "    ", block, flags=re.MULTILINE)
        elif block.startswith("    ") and not before.startswith(" "):
            blocks[i] = "::\n\n" + block
        before = block.rstrip("\n").rpartition("\n")[2]  # its last line
    lines[:] = "\n\n".join(blocks).split("\n")


def markup_to_rst(found: re.Match[str]) -> str:
    code, suffix, stars = found.groups()
    if code:
        return f"``{code}``\\ {suffix}" if suffix else f"``{code}``"
    return stars.replace("*", "\\*")


def setup(app: Any) -> None:
    app.connect("source-read", link_to_repository)
    app.connect("autodoc-process-docstring", markdown_to_rst, priority=400)  # before napoleon
