"""Notebooks are read cell by cell, with magics left out and places kept."""

import json


def notebook(*cells):
    """Return a notebook of code cells."""
    listed = [
        {"cell_type": "code", "source": cell.splitlines(keepends=True), "metadata": {}}
        for cell in cells
    ]
    text = {"cell_type": "markdown", "source": ["torch.seed()"], "metadata": {}}
    return json.dumps({"cells": [text, *listed], "nbformat": 4}, indent=1).encode()


def places(found):
    return [(finding.cell, finding.line, finding.column, finding.rule) for finding in found]


def test_names_flow_from_cell_to_cell(scan):
    data = notebook("import torch.nn.functional as F", "x = 1\ny = F.grid_sample(x, x)")
    found = scan(data, name="a.ipynb", whole=True)
    assert places(found) == [(3, 2, 5, "D9M101")]
    assert found[0].location.endswith("a.ipynb:cell 3:2:5")


def test_magics_are_left_out(scan):
    data = notebook(
        "%matplotlib inline\n!pip install torch\nimport torch\ntorch?\nfiles = !ls\nx = %env A",
        "%%time\ntorch.seed()",
        "%%bash\nfor x in set(; do",
        "if True:\n    %time torch.seed()\n    !ls",
    )
    found = scan(data, name="a.ipynb", whole=True)
    assert places(found) == [(3, 2, 1, "D9M204"), (5, 2, 5, "D9M204")]


def test_a_cell_that_does_not_parse_is_said_and_the_others_scanned(scan):
    data = notebook("def f(:", "import torch\ntorch.seed()")
    found = scan(data, name="a.ipynb", whole=True)
    assert places(found) == [(2, 1, 1, "D9M001"), (3, 2, 1, "D9M204")]
