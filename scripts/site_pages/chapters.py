"""A chapter as a page of the site: its links, its solutions folded, a line with ways to run it, a copy to download."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy

from nbformat import NotebookNode

from site_pages.links import BRANCH, for_site


def chapter_page(chapter: NotebookNode, name: str, pages: Collection[str], address: str) -> NotebookNode:
    """Return the page of the chapter `name`, such as `00_tour.ipynb`; its outputs stay as they are stored.

    pages, address: as in `for_site`.
    """
    page = deepcopy(chapter)
    for cell in page.cells:
        if cell.cell_type == "markdown":
            cell.source = for_site(cell.source, f"notebooks/{name}", pages, address)
        elif "solution" in cell.metadata.get("tags", []):
            cell.metadata.tags.append("hide-cell")
    title, _, rest = page.cells[0].source.partition("\n")
    page.cells[0].source = f"{title}\n\n{' · '.join(_ways(name, pages, address))}\n{rest}"
    return page


def to_download(chapter: NotebookNode, name: str, chapters: Collection[str], address: str) -> NotebookNode:
    """Return the chapter without solutions and outputs. Of its links those to other `chapters` stay relative.

    chapters, address: as `pages` and `address` in `for_site`.
    """
    made = deepcopy(chapter)
    made.cells = [cell for cell in made.cells if "solution" not in cell.metadata.get("tags", [])]
    for cell in made.cells:
        if cell.cell_type == "markdown":
            cell.source = for_site(cell.source, f"notebooks/{name}", chapters, address)
        else:
            cell.outputs, cell.execution_count = [], None
    return made


def _ways(name: str, pages: Collection[str], address: str) -> list[str]:
    """Links to the copy without solutions, to hosts that run the chapter, and to its page for a teacher."""
    ways = [f"{{download}}`Download without solutions <../exercises/{name}>`"]
    _, github, repository = address.partition("https://github.com/")
    if github:
        notebook = f"{repository}/blob/{BRANCH}/notebooks/{name}"
        ways.append(f"[Open in Colab](https://colab.research.google.com/github/{notebook})")
        lab = f"{repository}/{BRANCH}?urlpath=lab/tree/notebooks/{name}"
        ways.append(f"[Open in Binder](https://mybinder.org/v2/gh/{lab})")
    teacher = f"docs/teaching/{name[:2]}.md"
    return [*ways, f"[For the teacher](/{teacher})"] if teacher in pages else ways
