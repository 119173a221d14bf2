"""A hook of MkDocs: the start page of the site is the README, so there is one start."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Turn the README's links into the site's, and the guides' links to the README."""
    if page.file.src_uri == "index.md":
        markdown = markdown.replace("](docs/", "](").replace("](CHANGELOG.md)", "](changelog.md)")
    markdown = markdown.replace("](../../README.md", "](../index.md")
    # What the site does not have is named without a link.
    absent = (
        r"(?:\.\./\.\./)?(?:LICENSE|CONTRIBUTING\.md|data/README\.md|scripts/[\w./]+)(?:#[\w-]+)?"
    )
    return re.sub(rf"\[([^]]+)\]\({absent}\)", r"\1", markdown)
