"""One file alone touches what is private in Lightning; the tests of resuming train with it."""

import re
from pathlib import Path

from lightning_d9m.integrations.trainer import lightning_private

# Underscored names that other files use: of this package's callback, of Python, of torch's modules
# and tensors, and of torchmetrics.
ALLOWED = {"_auto_added", "_recorder", "_initializing", "_compiled_call_impl", "_orig_mod"}
ALLOWED |= {"_pytree", "_computed", "_forward_cache", "_update_count"}
# An attribute of another object, by its name or by a string, or a name that is imported.
NAME = r"(_[a-zA-Z]\w*)"
PRIVATE = (
    rf"(?<!\bself)(?<!\bcls)\.{NAME}|attr\([^\n]*, .{NAME}|from lightning\.\S+ import .*?\b{NAME}"
)


def test_no_other_file_uses_private_names_of_lightning():
    package = Path(lightning_private.__file__).parents[1]
    seen = set()
    rooms = [package / room for room in ("autoload", "lightning", "trainer", "strategies/steps")]
    rooms += [package / "strategies/horovod"]
    for path in (path for room in rooms for path in room.rglob("*.py")):
        source = path.read_text()
        found = {"".join(names) for names in re.findall(PRIVATE, source)}
        if path.name == "lightning_private.py":
            assert {"_combined_loader", "_compiler_ctx", "_logger_connector"} <= found
            continue
        assert "# ruff: noqa: SLF001" not in source, path
        assert found <= ALLOWED, f"{path}: move what is not allowed to lightning_private.py"
        seen |= found
    assert seen == ALLOWED, "the list has names that no file uses"
