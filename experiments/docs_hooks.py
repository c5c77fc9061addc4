"""Let mkdocs build the site: pages beside docs/, links as in the repository, nothing from afar.

mkdocs.yml names this file. Pages are written for the repository, so their links lead from a
file to a file. In the site the folder docs/ is the root, and other files keep their paths.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from experiments.docs_pages import pages

ROOT = Path(__file__).parents[1]
_BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "experiments/README.md", "experiments/LOG.md")
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?((?:https?:)?//[^\"\s>]+)")
_STYLED = re.compile(r"<link\b[^>]*\brel=\"?(?:stylesheet|preconnect|preload|icon)\"?[^>]*>")


def beside() -> list[str]:
    """Return the paths of the pages outside docs/ that are in the site."""
    results = (ROOT / "experiments/results").rglob("*.md")
    return [*_BESIDE, *sorted(path.relative_to(ROOT).as_posix() for path in results)]


def linked_files(page: str) -> Iterator[str]:
    """Yield the files outside docs/ that a page of the repository links to, pages left out."""
    for target, _ in _LINK.findall((ROOT / page).read_text()):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        if not path.startswith("docs/") and path not in beside() and (ROOT / path).is_file():
            yield path


def relinked(text: str, page: str) -> str:
    """Return a page's text with links to files of the repository turned into links of the site.

    Args:
        page: the page's path in the repository.
    """
    folder, here = posixpath.dirname(page), posixpath.dirname(page.removeprefix("docs/"))

    def turned(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / path).is_file():
            return link[0]
        return f"]({posixpath.relpath(path.removeprefix('docs/'), here or '.')}{anchor})"

    return _LINK.sub(turned, text)


def loaded_from_afar(html: str) -> list[str]:
    """Return what a page would load from a network; links that a reader follows are none."""
    styles = [one for one in _STYLED.findall(html) if re.search(r"href=\"?(?:https?:)?//", one)]
    return [*_LOADED.findall(html), *styles]


def on_files(files: Files, *, config: Any) -> Files:
    """Add the reference, the pages beside docs/, and the files that pages link to."""
    for place, text in pages().items():
        files.append(File.generated(config, place, content=text))
    documents = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    linked = {path for page in (*documents, *beside()) for path in linked_files(page)}
    for path in sorted({*beside(), *linked}):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **others: Any) -> str:
    """Turn a page's links into the site's."""
    place = page.file.src_uri
    return relinked(markdown, place if place in beside() else f"docs/{place}")


def on_post_build(*, config: Any) -> None:
    """Refuse a site that would load anything from a network."""
    for path in Path(config.site_dir).rglob("*.html"):
        if afar := loaded_from_afar(path.read_text()):
            raise PluginError(f"{path} loads {afar[0]}; serve that from the site itself")
