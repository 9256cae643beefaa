"""The trainings of docs/strategies.md by name, and what its table says of each: the tests show it.

Those of Fabric have its name in front; the others have a Trainer.
"""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
FABRIC = "Fabric, "
DDP, LOGICAL, PIPELINE = "ddp", "ddp_d9m, logical ranks", "Fabric, pipeline"
COLUMNS = ("agree", "fault", "ranks", "resume", "probes", "locate")
TABLE = {}
for line in PAGE.read_text().splitlines():
    if line.startswith("| `"):
        names, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        row = dict(zip(COLUMNS, shown, strict=True))
        TABLE |= dict.fromkeys(re.findall("`([^`]+)`", names), row)


def told(column, *words):
    """Return the trainings of which a column says one of these words."""
    return [name for name, own in TABLE.items() if any(word in own[column] for word in words)]


def find_launch(name):
    """Return the number of processes that train, or what starts them."""
    if match := re.search("(?<=_)(spawn|fork)|horovod", name):
        return "horovod" if match[0] == "horovod" else "launched"
    if "single device" in name:
        return 1
    return 4 if re.search("4 ranks|hsdp|hybrid|fsdp2 and tp", name) else 2


ALL = list(TABLE)
# Last those that slow down the ones after them, or close the connections of ranks by an error.
LAUNCHES = {
    launch: sorted(
        (name for name in ALL if find_launch(name) == launch),
        key=lambda name: (name == LOGICAL, name == PIPELINE),
    )
    for launch in (1, 2, 4, "launched", "horovod")
}
# These start two processes for each training; those of Fabric for all.
LAUNCHED = [name for name in LAUNCHES["launched"] if not name.startswith(FABRIC)]
# Ranks have copies of the same weights, or parts of them.
COPIES, DIVIDED = told("ranks", "all", "copies"), told("ranks", "nothing", "replicated")
TENSOR_PARALLEL = told("ranks", "replicated")
FLAT_ONES = [name for name in ALL if "flat" in name]
# A resume is refused, or can begin with a full checkpoint, too.
HYBRIDS, FULL = told("resume", "refused"), told("resume", "full")
LOCATED = told("locate", "yes")
# What the page says in a sentence is shown of some. An operation races; one rank has another
# reference, or drifts apart in every run.
RACING, REFERRED, DRIFTING = ["ddp", "fsdp2"], ["ddp", "Fabric, ddp"], ["ddp", "tp"]
# The checkpoints of the last step of these are compared with the ledger.
SHARDED = ["fsdp1", "fsdp2", "tp", "fsdp2 and tp"]
