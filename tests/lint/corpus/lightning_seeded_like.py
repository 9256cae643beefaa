"""The same, with the callback, which seeds."""

import lightning.pytorch as pl

from lightning_d9m import DeterminismCallback
from mylib import Net, make_data

trainer = pl.Trainer(max_epochs=3, callbacks=[DeterminismCallback(seed=3)])
trainer.fit(Net(), make_data())  # fine
