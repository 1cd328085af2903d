"""The documentation: its programs run, and public names have pages; `make docs` checks links."""

import importlib.util
import inspect
import re
import types
from pathlib import Path

import pytest

import jaxfused
from tests.support.grids import parametrize

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WITH_PROGRAMS = [p for p in (DOCS.parent / "README.md", *PAGES) if "```python" in p.read_text()]


@parametrize(
    "page",
    WITH_PROGRAMS,
    quick=(),
    ids=lambda page: str(page.relative_to(DOCS.parent).with_suffix("")),
)
def test_programs_run(page):
    """Blocks marked `python` form one program; those marked `py` need more than the tests have."""
    program = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    namespace: dict = {}
    exec(compile(program, str(page), "exec"), namespace)


def test_every_public_name_has_a_page():
    documented = set(
        re.findall(r"^::: jaxfused\.(\w+)$", "".join(map(Path.read_text, PAGES)), re.M)
    )
    public = {
        name
        for name in jaxfused.__all__
        if not isinstance(getattr(jaxfused, name), types.ModuleType)
    }
    assert public <= documented, f"no page has {sorted(public - documented)}"
    assert documented <= public, f"there is no {sorted(documented - public)}"


def test_every_module_has_a_page():
    import jaxfused.linen
    import jaxfused.nnx

    for name in ("linen", "nnx"):
        page = (DOCS / "modules" / f"{name}.md").read_text()
        package = getattr(jaxfused, name)
        ours = {
            n
            for n, value in vars(package).items()
            if isinstance(value, type) and value.__module__.startswith("jaxfused.")
        }
        missing = {n for n in ours if f"::: jaxfused.{name}.{n}\n" not in page + "\n"}
        # These are other names of a documented class.
        assert missing <= {"SelfAttention"}, f"{name}: {sorted(missing)}"


def test_links_of_other_pages_lead_somewhere():
    """`make docs` checks the links of docs/."""
    root = DOCS.parent
    pages = [*root.glob("*.md"), *(root / "benchmarks").rglob("*.md"), *root.glob("findings/*.md")]
    assert len(pages) > 5
    for page in pages:
        for target in re.findall(r"\]\(([^)\s#]+)(?:#\S*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(root)}: {target}"


def test_replaced_words_do_not_come_back():
    """The glossary's first table lists the older words, and no other page may use them."""
    root, glossary = DOCS.parent, DOCS / "glossary.md"
    table = glossary.read_text().partition("| older word | term |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    words = [word.strip() for row in rows for word in row.split(",")]
    assert len(words) > 20
    pattern = re.compile(rf"\b({'|'.join(words)})\b".replace(" ", r"\s+"), re.IGNORECASE)
    pages = {root / "README.md", root / "CONTRIBUTING.md", *PAGES} - {glossary}
    for page in sorted(pages):
        found = sorted({match[0] for match in pattern.finditer(page.read_text())})
        assert not found, f"{page.relative_to(root)} has {found}; docs/glossary.md has the terms"


def test_glossary_has_forty_entries():
    entries = re.findall(r"^- \*\*(.+)\*\*: ", (DOCS / "glossary.md").read_text(), re.M)
    assert len(entries) >= 40 and len(set(entries)) == len(entries)


# It imports what `make docs` installs, which `make test-all` runs before it.
@pytest.mark.exhaustive
def test_docstrings_become_markdown():
    spec = importlib.util.spec_from_file_location("docstrings", DOCS / "docstrings.py")
    docstrings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(docstrings)
    text = docstrings.markdown(inspect.getdoc(jaxfused.layer_norm))
    assert text.count("<math") == 1 and ".. math::" not in text
    assert "Examples:" in text and "[\\*leading, D]" in text
    for name in ("dot_product_attention", "qkv_projection", "softmax_cross_entropy"):
        assert "<math" in docstrings.markdown(inspect.getdoc(getattr(jaxfused, name)))
