"""scvi-tools' first tutorial: a variational autoencoder of counts, on its synthetic data."""

import scvi
from lightning.pytorch.callbacks import ModelCheckpoint

scvi.settings.seed = 0
adata = scvi.data.synthetic_iid(batch_size=400, n_genes=200)
scvi.model.SCVI.setup_anndata(adata, batch_key="batch", labels_key="labels")
model = scvi.model.SCVI(adata, n_hidden=64)
model.train(
    max_epochs=8,
    accelerator="cpu",
    check_val_every_n_epoch=2,
    enable_progress_bar=False,
    enable_checkpointing=True,
    callbacks=[ModelCheckpoint("checkpoints", save_last=True)],
)
print(model.get_latent_representation()[:2])
