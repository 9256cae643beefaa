"""A training of which ``d9m bisect`` finds the change, and contents of its module."""

from ledger_program import PROGRAM

TRAIN = f"""{PROGRAM}
from values import VALUES

train(VALUES)
Path("left-behind").write_text("a file that git does not know")
"""
SAME, OTHER = "VALUES = [1, 2, 3]", "VALUES = [1, 9, 8]"
BROKEN = "raise SystemExit(3)"
