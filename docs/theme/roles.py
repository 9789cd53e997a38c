"""An extension of griffe: docstrings name things as Sphinx does, and the site is not made by Sphinx."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:meth|class|mod|attr|func|data|obj):`(~?)([^`]+)`")


class PlainRoles(griffe.Extension):
    """``:meth:`step``` becomes ```step```, and ``:class:`~hdet.AutoLR``` ```AutoLR```; formulas become code.

    And "Example:", which the parser does not know, becomes "Examples:".
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)


def plain(text: str) -> str:
    """A docstring in Markdown."""
    text = ROLE.sub(lambda match: f"`{match[2].rpartition('.')[2] if match[1] else match[2]}`", text)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = re.sub(r":math:`([^`]+)`", lambda match: f"`{_formula(match[1])}`", text)
    text = re.sub(r"^\.\. math:: (.+)$", lambda match: f"`{_formula(match[1])}`", text, flags=re.MULTILINE)
    return re.sub(r"^\.\. math::\n+((?: +.+\n)+)", lambda match: _block(match[1]), text, flags=re.MULTILINE)


def _block(lines: str) -> str:
    return "```text\n" + "\n".join(_formula(line.strip()) for line in lines.splitlines()) + "\n```\n"


def _formula(tex: str) -> str:
    for pattern, instead in (
        (r"\\(?:mathrm|text|textstyle)\b(?:\{([^}]*)\})?", r"\1"),
        (r"\\(?:bar|overline)(?:\{([^}]*)\}| ?(\\?\w+))", r"mean(\1\2)"),
        (r"\\quad", " "),
        (r"\\leftarrow", "<-"),
        (r"\\le\b", "<="),
        (r"\\pm\b", "+-"),
        (r" *&= *", " = "),
        (r" *&\\?<- *", " <- "),
        (r" *\\\\$| *& *", "  "),
        (r"\\(\w+|\|)", r"\1"),
    ):
        tex = re.sub(pattern, instead, tex)
    return tex.strip()
