"""Charts as SVG.

Numbers of a comparison or an audit come in; elements of SVG as text go out. Read ``elements.py``
first.
"""
