"""Run each op of the catalog many times and count its distinct outputs.

Cases and a device come in; a row for each case goes out, measured in four conditions. Read
``report.py`` first, then ``measurement.py``.
"""
