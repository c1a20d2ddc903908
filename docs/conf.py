"""Sphinx configuration; `make docs` builds the site."""

from typing import Any

import jaxkv

project = "jaxkv"
author = "The jaxkv authors"
version = release = jaxkv.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"jaxkv {release}"
default_role = "code"  # docstrings have single backquotes, as Markdown
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures without annotations: docstrings give shapes and dtypes
napoleon_numpy_docstring = False
napoleon_use_ivar = True

REPOSITORY = "https://github.com/jaxkv/jaxkv/blob/main"


def link_to_repository(app: Any, page: str, source: list[str]) -> None:
    """Redirects links that leave docs/ (sources, records) to the repository."""
    source[0] = source[0].replace("](../", f"]({REPOSITORY}/")


def setup(app: Any) -> None:
    app.connect("source-read", link_to_repository)
