"""Render results for people: text, HTML, SVG, Markdown, JSON."""
