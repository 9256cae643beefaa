"""Compiles the kernels of portable bits into a wheel, for each vector width of its processors.

Hatchling calls the hook. Without a compiler the wheel has the sources only, and suits any platform.
"""

import importlib
import platform
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_ROOT = Path(__file__).parents[1]


class CustomBuildHook(BuildHookInterface):
    """Adds the compiled kernels to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless the wheel only names this folder; it then compiles at the first use."""
        if version == "editable":
            return
        compiler = load_compiler()
        self._made = tempfile.TemporaryDirectory()
        try:
            for width in compiler.list_widths():
                path = compiler.build(width, Path(self._made.name))
                name = f"lightning_d9m/ops/portability/{path.name}"
                build_data["force_include"][str(path)] = name
        except (OSError, subprocess.CalledProcessError) as error:
            build_data["force_include"].clear()
            self.app.display_warning(f"The kernels of portable bits are not compiled: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{name_platform()}"

    def finalize(self, version: str, *_: Any) -> None:
        """Remove what was compiled."""
        if version != "editable":
            self._made.cleanup()


def load_compiler() -> Any:
    """Import the module without what its packages import: a build has hatchling only."""
    for name in ("lightning_d9m", "lightning_d9m.ops", "lightning_d9m.ops.portability"):
        package = types.ModuleType(name)
        package.__path__ = [str(_ROOT.joinpath(*name.split(".")))]
        sys.modules.setdefault(name, package)
    return importlib.import_module("lightning_d9m.ops.portability.compiler")


def name_platform() -> str:
    """Return the tag of the platform: at least the C library of this one."""
    library, version = platform.libc_ver()
    kind = f"manylinux_{version.replace('.', '_')}" if library == "glibc" else "linux"
    return f"{kind}_{platform.machine()}"
