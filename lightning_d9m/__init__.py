"""Deterministic PyTorch Lightning training, proven by a ledger.

``__init__.pyi`` lists the public names and the module of each. They are loaded on first use, so
that importing the package loads neither torch nor Lightning, and the command line starts fast.
"""

import lazy_loader

import lightning_d9m_autoload
from lightning_d9m.version import __version__ as __version__

lightning_d9m_autoload.load_torch()

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
