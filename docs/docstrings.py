"""Turns what the docstrings of this package say into what Markdown can show.

A formula stands under `.. math::` there, and an example under "Example:". Formulas become MathML, which
browsers draw without a script; examples become a section that mkdocstrings knows.
"""

import inspect
import re
from typing import Any

import griffe
import latex2mathml.converter

_MATH = re.compile(
    r"^\.\. math::[ ]?(?P<same>[^\n]*)\n(?P<more>(?:[ ]+[^\n]*\n|\n(?=[ ]))*)", re.MULTILINE
)
_INLINE = re.compile(r":math:`(?P<formula>[^`]+)`")
_STAR = re.compile(r"(?<![`*\w\\])\*(?=\w)")
"""Of a shape such as [*leading, D], which Markdown would take for emphasis."""
_REFERENCE = re.compile(r":[a-z]+:`(?P<name>[^`]+)`")


def mathml(formula: str, display: str) -> str:
    """The formula of LaTeX as MathML."""
    formula = formula.replace(r"\_", "_").replace(r"\Bigl", r"\left").replace(r"\Bigr", r"\right")
    formula = formula.replace(r"\bigl", r"\left").replace(r"\bigr", r"\right")
    if "&" in formula or r"\\" in formula:
        formula = rf"\begin{{aligned}} {formula} \end{{aligned}}"
    return latex2mathml.converter.convert(formula, display=display)


def markdown(docstring: str) -> str:
    """The docstring as mkdocstrings takes it."""

    def block(match: re.Match[str]) -> str:
        formula = " ".join(f"{match['same']}\n{inspect.cleandoc(match['more'])}".split())
        return f"\n<div>{mathml(formula, 'block')}</div>\n\n"

    lines = docstring.split("\n")
    code = (">>>", "...")
    escaped = (
        line if line.lstrip().startswith(code) else _STAR.sub(r"\\*", line) for line in lines
    )
    text = _MATH.sub(block, "\n".join(escaped) + "\n")
    text = _INLINE.sub(lambda match: mathml(match["formula"], "inline"), text)
    text = _REFERENCE.sub(lambda match: f"`{match['name']}`", text)
    return re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE).rstrip()


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
