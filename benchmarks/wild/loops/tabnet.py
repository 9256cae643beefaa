"""Train pytorch-tabnet."""

import numpy as np
from pytorch_tabnet.tab_model import TabNetClassifier
from sklearn.datasets import load_digits

d = load_digits()
X = d.data.astype(np.float32)
model = TabNetClassifier(verbose=0, device_name="cpu")
model.fit(
    X[:1200],
    d.target[:1200],
    eval_set=[(X[1200:], d.target[1200:])],
    max_epochs=3,
    batch_size=256,
    virtual_batch_size=64,
)
