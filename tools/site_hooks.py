"""Hooks of MkDocs that build the site with `site_pages`."""

from __future__ import annotations

import os

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from tools import site_pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the folders in the navigation by their pages, and name the version.

    A site of several versions has a menu of them; elsewhere the site's name has the version.
    """
    docs = site_pages.DOCS
    pages = [str(path.relative_to(docs)) for path in docs.rglob("*.md")]
    config.nav = site_pages.expand_nav(list(config.nav or []), pages)
    if os.environ.get("MIKE_DOCS_VERSION"):
        config.extra["version"] = {"provider": "mike"}
    else:
        changes = (site_pages.ROOT / site_pages.CHANGES[0]).read_text()
        config.site_name = f"{config.site_name} {site_pages.version(changes)[1]}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of docs/ that pages link to."""
    targets = {site_pages.CHANGES[0]}
    for file in files.documentation_pages():
        location = site_pages.location_of(file.src_uri)
        targets |= site_pages.outside_targets(file.content_string, location)
    for path in sorted(targets - {"README.md"}):
        page = site_pages.page_of(path)
        content = site_pages.source_page(path)
        is_named = path == site_pages.CHANGES[0]
        inclusion = InclusionLevel.INCLUDED if is_named else InclusionLevel.NOT_IN_NAV
        shown = File.generated(config, page, content=content, inclusion=inclusion)
        files.append(shown)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri.startswith(site_pages.NOTES):
        page.meta["search"] = {"boost": 0.1}
    return site_pages.site_links(markdown, page.file.src_uri)
