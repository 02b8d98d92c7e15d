"""Files of the site besides its pages: a Markdown twin of each page, llms.txt and sitemap.xml.

The twins are made from the built pages, so they have the output of commands, and the reference.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

from bs4 import BeautifulSoup, Tag
from docutils import nodes
from markdownify import MarkdownConverter
from sphinx import addnodes
from sphinx.application import Sphinx

import cupyconv


class _Markdown(MarkdownConverter):
    """Converter that keeps the language of code, and links to other twins."""

    def convert_pre(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        block = el.find_parent(class_=lambda name: name and name.startswith("highlight-"))
        kind = next((name for name in (block or el)["class"] if "highlight-" in name), "")
        language = kind.removeprefix("highlight-").replace("default", "")
        return f"\n\n```{language}\n{el.get_text().rstrip()}\n```\n\n"

    def convert_a(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        place, mark, anchor = el.get("href", "").partition("#")
        if "://" not in place and place.endswith(".html") and "gallery/" not in place:
            el["href"] = f"{place.removesuffix('.html')}.md{mark}{anchor}"
        return super().convert_a(el, text, parent_tags)

    def convert_svg(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        title = el.get("aria-label") or (el.title and el.title.get_text()) or "a picture"
        return f"\n\n*Picture: {title}*\n\n"


def markdown(page: str) -> str:
    """Return the article of a built page as Markdown."""
    article = BeautifulSoup(page, "html.parser").find("article", role="main")
    for unused in article.select(".headerlink, .narrow, script, style, button"):
        unused.decompose()
    text = _Markdown(heading_style="atx", bullets="-").convert_soup(article)
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def index(app: Sphinx) -> str:
    """Return the text of llms.txt: each page with its first sentence, by section of the site."""
    first = app.env.get_doctree("index")
    lines = [f"# cupyconv {cupyconv.__version__}", "", f"> {_summary(first)}", ""]
    for tree in first.findall(addnodes.toctree):
        lines += [f"## {tree['caption']}", ""]
        names = [name for _, name in tree["entries"]]
        for name in names:
            names += app.env.toctree_includes.get(name, ())
            title, said = app.env.titles[name].astext(), _summary(app.env.get_doctree(name))
            lines.append(f"- [{title}]({_address(app, name)}.md): {said}")
        lines.append("")
    return "\n".join(lines)


def _summary(page: nodes.document) -> str:
    """Return the first sentence outside tables."""
    paragraphs = (p for p in page.findall(nodes.paragraph) if not isinstance(p.parent, nodes.entry))
    text = " ".join(next(paragraphs, nodes.paragraph()).astext().split())
    return text.split(". ")[0].rstrip(".:") + "."


def _address(app: Sphinx, name: str) -> str:
    return f"{app.config.html_baseurl}{name}"


def write(app: Sphinx, error: Exception | None) -> None:
    """Write the files when all pages are built."""
    if error or app.builder.name != "html":
        return
    folder, names = Path(app.outdir), sorted(app.env.found_docs)
    for name in names:
        page = (folder / f"{name}.html").read_text(encoding="utf-8")
        (folder / f"{name}.md").write_text(markdown(page), encoding="utf-8")
    (folder / "llms.txt").write_text(index(app), encoding="utf-8")
    places = "".join(f"<url><loc>{escape(_address(app, n))}.html</loc></url>\n" for n in names)
    (folder / "sitemap.xml").write_text(
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{places}</urlset>\n'
    )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the writer with Sphinx."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
