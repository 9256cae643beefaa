"""Lightning's Trainer at the top of a script, with no seed."""

import lightning.pytorch as pl
from sklearn.preprocessing import StandardScaler

from mylib import Net, make_data

scaler = StandardScaler()
data = make_data(scaler.fit([[1.0], [2.0]]))  # fine
trainer = pl.Trainer(max_epochs=3)
trainer.fit(Net(), data)  # expect: D9M210
pl.Trainer(max_epochs=1).fit(Net(), data)  # fine
