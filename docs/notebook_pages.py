"""Show the notebooks and the examples as pages: a hook that mkdocs calls (``hooks`` in mkdocs.yml).

A notebook becomes a Markdown page of the same name, so that its links are checked and its code
looks like that of other pages. The notebook itself is copied beside the page. The page of the
examples is examples/README.md, and the programs are copied beside it.
"""

import json
import re
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

EXAMPLES = Path(__file__).parents[1] / "examples"
_LINK = re.compile(r"(\]\([^)\s]+)\.ipynb(?=[#)])")


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add a page for each notebook."""
    from mkdocs.structure.files import File

    for file in list(files):
        path = PurePosixPath(file.src_uri)
        if path.suffix == ".ipynb":
            cells = json.loads(Path(file.abs_src_path).read_text())["cells"]
            page = path.with_suffix(".md").as_posix()
            files.append(File.generated(config, page, content=render_cells(cells, path.name)))
    readme = (EXAMPLES / "README.md").read_text()
    files.append(File.generated(config, "examples.md", content=move_links(readme)))
    for program in EXAMPLES.glob("*.py"):
        copy = File.generated(config, f"examples/{program.name}", abs_src_path=str(program))
        files.append(copy)
    return files


def on_page_markdown(markdown: str, *, page: "Page", **_: object) -> str:
    """Let links to notebooks and to the examples lead to their pages."""
    return markdown if page.file.src_uri.startswith("notebooks/") else link_pages(markdown)


def link_pages(markdown: str) -> str:
    """Return Markdown whose links to notebooks and to the examples lead to their pages."""
    return _LINK.sub(r"\1.md", markdown).replace("](../examples/README.md)", "](examples.md)")


def move_links(readme: str) -> str:
    """Return examples/README.md with the links that it has as a page of the documentation."""
    return re.sub(r"\]\((\w+\.py)\)", r"](examples/\1)", readme.replace("](../docs/", "]("))


def render_cells(cells: list[dict[str, Any]], name: str) -> str:
    """Return the cells as Markdown, with a link to the file below the title."""
    heading, _, introduction = "".join(cells[0]["source"]).partition("\n")
    link = f"[Download this notebook]({name})"
    parts = chain([introduction], *map(_render_cell, cells[1:]))
    return "\n\n".join([heading, link, *(link_pages(part).strip("\n") for part in parts)]) + "\n"


def _render_cell(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    language = "sh" if source.startswith(("!", "%%bash")) else "python"
    return [_fence(language, source), *map(_render_output, cell["outputs"])]


def _render_output(output: dict[str, Any]) -> str:
    text = output.get("text", output.get("data", {}).get("text/plain", ()))
    return _fence("text", "".join(text).strip("\n"))


def _fence(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"
