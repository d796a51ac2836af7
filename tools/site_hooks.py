"""Hooks of MkDocs that build the site with `site_pages`."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from tools import site_pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the folders in the navigation by their pages."""
    docs = site_pages.DOCS
    pages = [str(path.relative_to(docs)) for path in docs.rglob("*.md")]
    config.nav = site_pages.expand_nav(list(config.nav or []), pages)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of docs/ that pages link to."""
    targets: set[str] = set()
    for file in files.documentation_pages():
        location = site_pages.location_of(file.src_uri)
        targets |= site_pages.outside_targets(file.content_string, location)
    for path in sorted(targets - {"README.md"}):
        page = site_pages.page_of(path)
        content = site_pages.source_page(path)
        shown = File.generated(config, page, content=content, inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(shown)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri.startswith(site_pages.NOTES):
        page.meta["search"] = {"boost": 0.1}
    return site_pages.site_links(markdown, page.file.src_uri)
