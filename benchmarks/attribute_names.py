"""Findings by attribute names, as torchdetscan 0.1 matches them: the baseline of scan.py.

Its behavior, reimplemented: every call whose function is an attribute (``F.interpolate``, never a
bare ``interpolate``) of a name that torch 2.3's documentation lists is found, whatever object has
that attribute. Four names also look at a keyword that is a literal. A call of
``use_deterministic_algorithms(True)`` drops the names that torch then makes deterministic.
"""

import ast

SWITCHING = frozenset(
    [
        "Conv1d",
        "Conv2d",
        "Conv3d",
        "ConvTranspose1d",
        "ConvTranspose2d",
        "ConvTranspose3d",
        "ReplicationPad2d",
        "bmm",
        "index_put",
        "put_",
        "scatter_add_",
        "gather",
        "index_add",
        "index_select",
        "repeat_interleave",
        "index_copy",
        "scatter",
        "scatter_reduce",
    ]
)
RAISING = frozenset(
    [
        "AvgPool3d",
        "AdaptiveAvgPool2d",
        "AdaptiveAvgPool3d",
        "MaxPool3d",
        "AdaptiveMaxPool2d",
        "FractionalMaxPool2d",
        "FractionalMaxPool3d",
        "MaxUnpool1d",
        "MaxUnpool2d",
        "MaxUnpool3d",
        "interpolate",
        "ReflectionPad1d",
        "ReflectionPad2d",
        "ReflectionPad3d",
        "ReplicationPad1d",
        "ReplicationPad3d",
        "NLLLoss",
        "CTCLoss",
        "EmbeddingBag",
        "put_",
        "histc",
        "bincount",
        "kthvalue",
        "median",
        "grid_sample",
        "cumsum",
        "scatter_reduce",
        "resize_",
    ]
)
KEYWORDS = {
    "interpolate": ("mode", {"linear", "bilinear", "bicubic", "trilinear"}),
    "EmbeddingBag": ("mode", {"max"}),
    "scatter_reduce": ("reduce", {"prod"}),
}


class _Matcher(ast.NodeVisitor):
    def __init__(self):
        self.names = SWITCHING | RAISING
        self.lines = []

    def visit_Call(self, node):
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name == "use_deterministic_algorithms":
                self._switch(node)
            if name in self.names and self._holds(name, node):
                self.lines.append(node.lineno)
        self.generic_visit(node)

    def _switch(self, node):
        if len(node.args) == 1 and isinstance(node.args[0], ast.Constant):
            on = bool(node.args[0].value)
            self.names = self.names - SWITCHING if on else self.names | SWITCHING

    def _holds(self, name, node):
        if name not in KEYWORDS:
            return True
        keyword, values = KEYWORDS[name]
        return any(
            word.arg == keyword
            and isinstance(word.value, ast.Constant)
            and word.value.value in values
            for word in node.keywords
        )


def match_names(text):
    """Return the lines that the approach finds in a source."""
    matcher = _Matcher()
    matcher.visit(ast.parse(text))
    return matcher.lines
