"""Links of a page in the repository, as they must be on the site.

The folder that Sphinx reads has the layout of the repository, so a link from one page to another stays as it is. A link
to any other file leads to the repository if its address is known; otherwise it becomes the file's name.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Collection
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
BRANCH = "main"
_LINK = re.compile(r"(!?)\[((?:[^\[\]`]|`[^`]*`)*)\]\(([^()\s]+)\)")
_CODE = re.compile(r"(^ *```.*?^ *``` *$)", re.MULTILINE | re.DOTALL)


def repository() -> str:
    """Address of the repository, from `[project.urls]` in pyproject.toml; empty until its owner fills it in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Repository", "").rstrip("/")


def for_site(text: str, page: str, pages: Collection[str], address: str) -> str:
    """Return the Markdown of `page` with links that work on the site.

    page, pages: paths in the repository; `pages` are those that the site has.
    address: of the repository; empty if it is not known.
    Raises ValueError for a link to a file that does not exist.
    """

    def rewritten(match: re.Match[str]) -> str:
        bang, words, target = match.groups()
        path, _, anchor = target.partition("#")
        if bang or not path or "://" in target or path.startswith("mailto:"):
            return match[0]
        start = "" if path.startswith("/") else str(PurePosixPath(page).parent)
        found = posixpath.normpath(posixpath.join(start, path.lstrip("/")))
        if found in pages:
            return match[0]
        for home, whole in ((f"{found}/index.md", f"/{found}/index.md"), (found, "/index.md")):
            if home in pages or home == "README.md":
                return f"[{words}]({whole})"
        if not (ROOT / found).exists():
            raise ValueError(f"{page}: the link to {target} leads nowhere")
        if address:
            return f"[{words}]({address}/blob/{BRANCH}/{found}{f'#{anchor}' if anchor else ''})"
        return f"`{found}`" if words.strip("`") in found else f"{words} (`{found}`)"

    parts = _CODE.split(text)
    return "".join(part if i % 2 else _LINK.sub(rewritten, part) for i, part in enumerate(parts))
