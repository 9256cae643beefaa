"""Write the pictures of examples/README.md: what a terminal shows when the examples run.

Run it with: python docs/record_examples.py [NAME ...]
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from record_terminal import ROOT, record

IMAGES = ROOT / "docs" / "images"
# The command of each picture, run in a copy of examples/.
EXAMPLES = {
    "digits": "d9m repeat -n 2 -- python digits.py --epochs 2",
    "graph": "d9m repeat -n 3 -- python graph.py",
    "plain-torch": "d9m repeat -n 2 -- python plain_torch.py",
    "logical-ranks": "d9m repeat --processes 1,2 -- python logical_ranks.py",
}


def main() -> None:
    """Record the examples that are named, or all."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name in sys.argv[1:] or EXAMPLES:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(ROOT / "examples", folder, dirs_exist_ok=True)
            record([(EXAMPLES[name], None)], Path(folder), IMAGES / f"example-{name}.svg")


if __name__ == "__main__":
    main()
