"""PyTorch Geometric's example "pytorch_lightning/gin.py": it classifies graphs."""

import torch
import torch.nn.functional as F
from lightning import pytorch as pl
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import GIN, MLP, global_add_pool
from torch_geometric.utils import erdos_renyi_graph
from torchmetrics import Accuracy


class Model(pl.LightningModule):
    """A GIN, a sum over each graph's nodes, and a classifier."""

    def __init__(self, in_channels: int, out_channels: int, hidden_channels: int = 64) -> None:
        super().__init__()
        self.gnn = GIN(in_channels, hidden_channels, 3, dropout=0.5, jk="cat")
        self.classifier = MLP(
            [hidden_channels, hidden_channels, out_channels], norm="batch_norm", dropout=0.5
        )
        self.train_acc = Accuracy(task="multiclass", num_classes=out_channels)
        self.val_acc = Accuracy(task="multiclass", num_classes=out_channels)
        self.test_acc = Accuracy(task="multiclass", num_classes=out_channels)

    def forward(self, x, edge_index, batch):
        """Return the logits of each graph."""
        return self.classifier(global_add_pool(self.gnn(x, edge_index), batch))

    def training_step(self, data):
        """Return the loss."""
        y_hat = self(data.x, data.edge_index, data.batch)
        self.train_acc(y_hat.softmax(dim=-1), data.y)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True, batch_size=64)
        return F.cross_entropy(y_hat, data.y)

    def validation_step(self, data):
        """Log the accuracy."""
        y_hat = self(data.x, data.edge_index, data.batch)
        self.val_acc(y_hat.softmax(dim=-1), data.y)
        self.log("val_acc", self.val_acc, on_step=False, on_epoch=True, batch_size=64)

    def test_step(self, data):
        """Log the accuracy."""
        y_hat = self(data.x, data.edge_index, data.batch)
        self.test_acc(y_hat.softmax(dim=-1), data.y)
        self.log("test_acc", self.test_acc, on_step=False, on_epoch=True, batch_size=64)

    def configure_optimizers(self):
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def make_graph(label: int) -> Data:
    """Return a random graph of 20 nodes; its density depends on the label."""
    edges = erdos_renyi_graph(20, 0.1 + 0.1 * label)
    return Data(x=torch.randn(20, 16), edge_index=edges, y=torch.tensor([label]))


graphs = [make_graph(number % 2) for number in range(1200)]
data = LightningDataset(
    graphs[:1000], graphs[1000:1100], graphs[1100:], batch_size=64, num_workers=0
)
trainer = pl.Trainer(
    accelerator="cpu",
    max_epochs=6,
    callbacks=[pl.callbacks.ModelCheckpoint(monitor="val_acc", save_top_k=1, mode="max")],
    log_every_n_steps=5,
    enable_progress_bar=False,
)
model = Model(16, 2)
trainer.fit(model, data)
trainer.test(ckpt_path="best", datamodule=data)
