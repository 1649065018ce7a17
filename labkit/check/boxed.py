"""The look of a score and of a bet: a headline and paragraphs, as wrapped text or as HTML."""

from __future__ import annotations

import textwrap
from html import escape

WIDTH = 90
"""Columns of the text."""
_COLORS = {"right": "#1a7f37", "near": "#9a6700", "wrong": "#cf222e", "open": "#57606a"}
"""Kind -> background of the white words of a headline. The rest keeps the colours of the page, light or dark."""


def wrapped(text: str, start: str = "") -> str:
    """Wrap a text at blanks. Its later lines are indented as far as the first one, or by two blanks if that is not."""
    later = " " * (len(start) or 2)
    blanks = textwrap.TextWrapper(
        WIDTH, initial_indent=start, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
    return blanks.fill(text)


def boxed(kind: str, name: str, headline: str, *paragraphs: str) -> str:
    """Return HTML: a coloured name with its headline, and below them paragraphs, which are HTML already."""
    color = _COLORS[kind]
    badge = f"background:{color};color:#fff;border-radius:3px;padding:1px 7px;font-weight:600"
    box = f"border-left:4px solid {color};padding:2px 0 2px 10px;max-width:60em;line-height:1.5"
    head = f"<div><span style='{badge}'>{escape(name)}</span> {escape(headline)}</div>"
    return f"<div style='{box}'>{head}{''.join(paragraphs)}</div>"


def paragraph(text: str) -> str:
    """Return a paragraph of HTML."""
    return f"<div>{escape(text)}</div>"
