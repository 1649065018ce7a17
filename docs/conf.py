"""Sphinx's configuration of the site; `make docs` builds it (scripts/make_docs.py)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ADDRESS = PROJECT.get("urls", {}).get("Repository", "")

project = "labkit"
author = "The labkit authors"
release = PROJECT["version"]
html_title = f"labkit {release}"
html_theme = "sphinx_book_theme"
html_use_index = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_math_renderer = "mathml"
html_theme_options: dict[str, Any] = {
    "repository_url": ADDRESS,
    "use_repository_button": bool(ADDRESS),
    "use_issues_button": bool(ADDRESS),
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],
    "pygments_dark_style": "github-dark",
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "search_bar_text": "Search",
}

smartquotes = False
highlight_language = "text"  # of blocks that name none, such as commands and what they print
extensions = ["myst_nb", "sphinx_copybutton", "sphinx.ext.githubpages"]
exclude_patterns = ["exercises"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = "Show the solution"
nb_code_prompt_hide = "Hide the solution"
copybutton_exclude = ".linenos, .gp, .go"
maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
nitpick_ignore_regex = [("py:class", ".*")]  # types of signatures: torch's, numpy's, and modules' own


def _inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="formula">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Formulas become MathML, which browsers draw by themselves, so that the site needs no other server."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
