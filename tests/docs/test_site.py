"""The site asks no third party, finds names by their parts, and fits a phone."""

import re
from types import SimpleNamespace

import pytest
import yaml
from scripts import ROOT, load_script

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
mark_tables = load_script("docs/narrow_tables.py").on_page_content


def test_a_reader_s_browser_asks_no_third_party():
    """The theme loads fonts and counts stars unless it is kept from both."""
    config = SimpleNamespace(extra=dict(SITE["extra"]))
    load_script("docs/links.py").on_config(config)
    assert not hasattr(config, "repo_url")
    assert not {"repo_url", "repo_name"} & SITE.keys()
    assert SITE["theme"]["font"] is False
    assert "analytics" not in config.extra
    own = [*SITE["extra_css"], *SITE["extra_javascript"]]
    assert all((ROOT / "docs" / name).is_file() for name in own)
    (link,) = config.extra["social"]
    assert link["link"].endswith("/lightning_d9m")


def test_the_search_finds_the_parts_of_a_name():
    (options,) = [one["search"] for one in SITE["plugins"] if "search" in one]
    words = re.split(options["separator"], '`np.random.default_rng()`, probes=("op")')
    assert {"np", "random", "default_rng", "probes", "op"} <= set(words)


@pytest.mark.parametrize(("name", "stacked"), [("fill_uninitialized_memory", True), ("a", False)])
def test_a_table_that_is_too_wide_for_a_phone_is_marked(name, stacked):
    cells = f"<tr><td><code>{name}</code></td><td align='right'>True</td><td></td></tr>"
    head = "<tr><th>setting</th><th>its <em>default</em></th><th>text</th></tr>"
    page = mark_tables(f"<p>a</p><table><thead>{head}</thead><tbody>{cells}</tbody></table>")
    assert ('<table class="stacked">' in page) is stacked
    titles = re.findall('<td data-title="(.*?)"', page)
    assert titles == (["setting", "its default", "text"] if stacked else [])
