"""The page of a report: one HTML file that needs nothing else, for light, dark, print and phone."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from hdet.checks import printable
from hdet_lab.reports.drawing import PALETTE, Chart

# The same hues, lighter where the background is dark.
DARK_PALETTE = ("#4fa8e0", "#ff8a3d", "#2fc79c", "#e29bc4", "#f2b632", "#a5dcff")
NUM_LEADS = 2  # charts above the tables: what happened to the loss, and by which learning rate


@dataclass
class Table:
    """A title, a row of heads, and rows."""

    title: str
    heads: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def without_empty_columns(self) -> Table:
        """The same, less the columns that have nothing in any row."""
        kept = [k for k in range(len(self.heads)) if any(row[k] not in ("", "-") for row in self.rows)]
        return Table(self.title, [self.heads[k] for k in kept], [[row[k] for k in kept] for row in self.rows])


def number(value: float | None) -> str:
    """For a table; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.3g}" if 0 < abs(value) < 0.01 or abs(value) >= 1e6 else f"{value:.4f}"


def facts_table(title: str, facts: Mapping[str, Any]) -> Table:
    """What a run depended on: its ``config``, then everything else that says something."""
    rows = {**facts["config"], **{name: value for name, value in facts.items() if name != "config"}}
    if isinstance(rows.get("hardware"), dict):
        rows |= rows.pop("hardware")
    texts = [[k, ", ".join(map(str, v)) if isinstance(v, (list, tuple)) else str(v)] for k, v in rows.items()]
    return Table(title, ["what", "value"], [row for row in texts if row[1].strip() not in ("", "None", "{}")])


def page(
    title: str,
    tables: Sequence[Table],
    charts: Sequence[Chart],
    details: Sequence[Table],
    *,
    headline: str = "",
    about: Sequence[str] = (),
    notes: Sequence[str] = (),
    events: Sequence[tuple[str, str]] = (),
) -> str:
    """The whole document. Whatever the texts hold, they are shown as text.

    Args:
        title: of the document, and its headline where it has no other.
        tables: below the first charts.
        charts: the first two stand above the tables.
        details: how it was made, folded away.
        headline: what was found.
        about: short facts below the headline, before date and version.
        notes: what a reader must know about the figures.
        events: when, and what happened.
    """
    today = date.today()
    return _template().render(
        title=title,
        headline=headline or title,
        about=[*about, f"{today.day} {today:%B %Y}", f"hdet {_version()}"],
        notes=notes,
        tables=tables,
        leads=charts[:NUM_LEADS],
        charts=charts[NUM_LEADS:],
        events=events,
        details=details,
        light=PALETTE,
        dark=DARK_PALETTE,
    )


def _version() -> str:
    try:
        return metadata.version("hdet")
    except metadata.PackageNotFoundError:  # a checkout on the path
        return "from source"


@functools.cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("hdet_lab.reports"), autoescape=True, undefined=StrictUndefined, finalize=_shown
    )
    return environment.get_template("page.html")


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value)
