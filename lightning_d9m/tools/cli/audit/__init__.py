"""``d9m audit``: measure the nondeterminism of ops, and its cost.

The words of a command come in; its report goes out as text, JSON and Markdown. Each command has a
file. Read ``ops.py`` first.
"""

COMMANDS = {
    "ops": "measure every op that may be nondeterministic",
}
