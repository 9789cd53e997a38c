"""The address of the site leads to the guide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAGE = """<!doctype html>
<title>hdet</title>
<meta http-equiv="refresh" content="0; url=guide/">
<a href="guide/">Guide</a>
"""


def on_post_build(config: Any) -> None:
    """Write it, when all pages are there."""
    (Path(config["site_dir"]) / "index.html").write_text(PAGE)
