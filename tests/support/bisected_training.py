"""A training of which ``d9m bisect`` finds the change, and contents of its module."""

# Leaves a ledger as a training does, without importing torch; the values come from a module.
TRAIN = """
import os
from pathlib import Path
from lightning_d9m.ledger.format.writer import LedgerWriter
from lightning_d9m.ledger.folder import create_ledger_folder, rank_path
from lightning_d9m.ledger.format.records import Digests, End, Header, RunFacts
from values import VALUES

folder = create_ledger_folder(Path(os.environ["LIGHTNING_D9M_LEDGER_DIR"]))
with LedgerWriter(rank_path(folder, 0)) as ledger:
    ledger.write(Header(rank=0, world_size=1, fit=0, seed=42, created="", package="0",
                        settings={}, stack={}).as_record())
    ledger.write(RunFacts(model="m", parameters=1, train=[]).as_record())
    for epoch, value in enumerate(VALUES):
        digest = f"{value:032x}"
        ledger.write(Digests(moment="epoch", epoch=epoch, step=epoch + 1,
                             totals={"weights": digest}, groups={"weights": {"w": digest}},
                             loss=(0.1).hex()).as_record())
    ledger.write(End(status="finished").as_record())
Path("left-behind").write_text("a file that git does not know")
"""
SAME, OTHER = "VALUES = [1, 2, 3]", "VALUES = [1, 9, 8]"
BROKEN = "raise SystemExit(3)"
