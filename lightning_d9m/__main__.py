"""Entry point of ``python -m lightning_d9m``, the same as ``d9m``."""

import sys

from lightning_d9m.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
