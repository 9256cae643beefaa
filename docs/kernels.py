"""Compiles the kernels of portable bits into a wheel, for each vector width of its processors.

Hatchling calls the hook. Without a compiler the wheel has the sources only, and suits any platform.
"""

import importlib.util
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path(__file__).parents[1] / "lightning_d9m" / "ops" / "portability"


class CustomBuildHook(BuildHookInterface):
    """Adds the compiled kernels to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless the wheel only names this folder; it then compiles at the first use."""
        if version == "editable":
            return
        spec = importlib.util.spec_from_file_location("compiler", _FOLDER / "compiler.py")
        compiler = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiler)
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


def name_platform() -> str:
    """Return the tag of the platform: at least the C library of this one."""
    library, version = platform.libc_ver()
    kind = f"manylinux_{version.replace('.', '_')}" if library == "glibc" else "linux"
    return f"{kind}_{platform.machine()}"
