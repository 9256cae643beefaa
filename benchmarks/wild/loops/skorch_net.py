"""Cross-validate a network of skorch."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from skorch import NeuralNetClassifier
from torch import nn


class Net(nn.Module):
    """A network with dropout."""

    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(width, 10),
            nn.Softmax(dim=-1),
        )

    def forward(self, x):
        """Return the probabilities of the classes."""
        return self.layers(x)


digits = load_digits()
X, y = digits.data.astype(np.float32) / 16, digits.target.astype(np.int64)
net = NeuralNetClassifier(Net, max_epochs=3, lr=0.1, iterator_train__shuffle=True, verbose=0)
print(cross_val_score(net, X, y, cv=3))
