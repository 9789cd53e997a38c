"""The page of a report: one HTML file that needs nothing else, for light, dark, print and phone."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from hdet.command_line import printable
from hdet.lab.reports.charts import PALETTE, Chart

# The same hues, lighter where the background is dark.
DARK_PALETTE = ("#4fa8e0", "#ff8a3d", "#2fc79c", "#e29bc4", "#f2b632", "#a5dcff")


@dataclass
class Table:
    """A title, a row of heads, and rows."""

    title: str
    heads: list[str]
    rows: list[list[str]] = field(default_factory=list)


def number(value: float | None) -> str:
    """For a table; a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.4f}"


def facts_table(title: str, facts: Mapping[str, Any]) -> Table:
    """What a run depended on: its ``config``, then everything else."""
    rows = {**facts["config"], **{name: value for name, value in facts.items() if name != "config"}}
    if isinstance(rows.get("hardware"), dict):
        rows |= rows.pop("hardware")
    texts = [[k, ", ".join(map(str, v)) if isinstance(v, (list, tuple)) else str(v)] for k, v in rows.items()]
    return Table(title, ["what", "value"], texts)


def page(title: str, tables: Sequence[Table], charts: Sequence[Chart], details: Sequence[Table]) -> str:
    """The whole document; ``details`` are folded away. Whatever the texts hold, they are shown as text."""
    return _template().render(
        title=title, tables=tables, charts=charts, details=details, light=PALETTE, dark=DARK_PALETTE
    )


@functools.cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("hdet.lab.reports"), autoescape=True, undefined=StrictUndefined, finalize=_shown
    )
    return environment.get_template("page.html")


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value)
