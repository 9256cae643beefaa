"""Render results that several commands show: text, HTML, SVG, Markdown, JSON.

Results of comparisons and repeated runs come in; text in one of these forms goes out, and nothing
is measured or compared here. Read ``terminal.py`` and ``columns.py`` first, which tables share;
``html_page.py`` fills the page of ``d9m report``.
"""
