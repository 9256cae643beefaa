"""Absolute links to this project, all made of `tool.lightning_d9m.repository` in pyproject.toml.

Hatchling calls the hook for the metadata of a release, and mkdocs the other two for the pages.
"""

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).parents[1]
_VARIABLE = re.compile(r'^repository = "https://([^/"]+)/([^/"]+)/([^/"]+)"$', re.MULTILINE)
_RELATIVE = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")
_IMAGE = re.compile(r"(!\[[^\]]*)\]\((?!https?:)([^)\s]+)\)")


def read_urls() -> dict[str, str]:
    """Return the URLs of the project by their names in the metadata."""
    found = _VARIABLE.search((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found is not None, "pyproject.toml names the repository"
    host, owner, name = found.groups()
    repository = f"https://{host}/{owner}/{name}"
    # Each version of the pages has a folder; `latest` is that of the last release.
    pages = f"https://{owner.lower()}.{host.partition('.')[0]}.io/{name}/latest/"
    return {
        "Homepage": repository,
        "Documentation": pages,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }


def make_absolute(markdown: str) -> str:
    """Return the README with links that lead somewhere from any page."""
    repository = read_urls()["Homepage"]
    markdown = _IMAGE.sub(rf"\1]({repository}/raw/main/\2)", markdown)
    return _RELATIVE.sub(rf"]({repository}/blob/main/\1)", markdown)


class CustomMetadataHook(MetadataHookInterface):
    """Adds URLs, and the README with absolute links, to the metadata of a release."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add what pyproject.toml lists as dynamic."""
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = read_urls()
        metadata["readme"] = {"content-type": "text/markdown", "text": make_absolute(text)}


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """Set the addresses of the site and of the repository."""
    urls = read_urls()
    config.site_url = urls["Documentation"]
    # With `repo_url`, the theme's script would ask the repository's host for its stars, from the
    # browser of each reader. A link in the footer asks nobody.
    link = {"icon": "material/source-repository", "link": urls["Homepage"], "name": "Repository"}
    config.extra["social"] = [link]
    return config


def on_post_build(config: "MkDocsConfig") -> None:
    """Write llms.txt, the list of pages for programs that read them."""
    (Path(config.site_dir) / "llms.txt").write_text(list_pages(config.nav or []), encoding="utf-8")


def list_pages(nav: list[dict[str, Any]]) -> str:
    """Return llms.txt: what the project is, and each page with its first sentence."""
    documentation = read_urls()["Documentation"]
    lines = [
        "# lightning_d9m",
        "",
        "> Bit-exact PyTorch Lightning training, a ledger that proves it,",
    ]
    lines.append("> and the line to blame when two runs differ.")
    for section in nav:
        for title, pages in section.items():
            lines += ["", f"## {title}", ""]
            for page in pages:
                for name, file in page.items():
                    address = documentation + str(PurePosixPath(file).with_suffix("")) + "/"
                    address = address.replace("/index/", "/")
                    lines.append(f"- [{name}]({address})")
    return "\n".join([*lines, ""])
