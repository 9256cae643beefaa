"""Run the notebooks of docs/notebooks, and write them with their outputs.

Run it with: python docs/run_notebooks.py [NAME ...]
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
TIMEOUT = 300
# What commands send to a terminal: colors, and the moves of a status line.
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

_MISSING_WIDGETS = "IProgress not found"


def run_notebook(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Run a notebook in a folder; return it with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    return notebook


def clean(notebook: nbformat.NotebookNode, folders: Sequence[Path]) -> None:
    """Remove from the outputs what depends on this machine: escapes and the paths of folders.

    A warning of tqdm that ipywidgets is not installed is removed, too.
    """
    for cell in notebook.cells:
        if "outputs" in cell:
            cell["outputs"] = [
                output
                for output in cell["outputs"]
                if _MISSING_WIDGETS not in output.get("text", "")
            ]
        for output in cell.get("outputs", ()):
            if "text" in output:
                output["text"] = _clean(output["text"], folders)
            for kind, text in output.get("data", {}).items():
                output["data"][kind] = _clean(text, folders)
    notebook.metadata.language_info = {"name": "python"}


def _clean(text: str, folders: Sequence[Path]) -> str:
    text = _ESCAPE.sub("", text).replace("\r\n", "\n")
    for folder in folders:
        text = text.replace(f"{folder}/", "")
    return text.strip("\n") + "\n"


def main() -> None:
    """Run the notebooks that are named, or all."""
    chosen = [FOLDER / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb"))
    for path in chosen:
        with TemporaryDirectory() as name:
            folder = Path(name).resolve()
            notebook = run_notebook(path, folder)
        clean(notebook, (folder, ROOT, Path(sys.base_prefix)))
        nbformat.write(notebook, path)
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
