"""Both of Lightning's packages are loaded before the callback, which then takes both as bases."""

import lightning.pytorch  # noqa: F401
import pytorch_lightning  # noqa: F401
