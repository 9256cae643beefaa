"""Write docs/images/report-*.png: reports as a browser shows them.

It needs the browser Chromium (the command ``chromium``) and Pillow.

Run it with: python docs/draw_report.py
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PROBES = "weight,batch,input,output,gradient,loss"
NOISY = (ROOT / "examples" / "noisy_digits.py").read_text().replace("max_epochs=1", "max_epochs=6")
# In step 27 of the second run, one output is larger by 0.01.
TRANSFORMER = """
import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Transformer(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(32, 64)
        self.encoder.layers[2].linear1.register_forward_hook(self.change)

    def change(self, module, inputs, output):
        if self.global_step == 27 and os.environ.get("CHANGE"):
            output.detach()[0, 0, 0] += 0.01

    def training_step(self, tokens, _):
        logits = self.head(self.encoder(self.embedding(tokens[0][:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[0][:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


tokens = torch.randint(64, (320, 17), generator=torch.Generator().manual_seed(0))
trainer = L.Trainer(max_epochs=3, logger=False, enable_checkpointing=False)
trainer.fit(Transformer(), DataLoader(TensorDataset(tokens), 16, shuffle=True))
"""
WIDE, NARROW, HEIGHT = 1100, 400, 6000
# Of each picture: the report, the width of the window, and the first heading and the one after it.
PICTURES = {
    "report-desktop": ("noisy", WIDE, "", "Comparison"),
    "report-modules": ("changed", WIDE, "Ranks and modules by step", "All that differs there"),
    "report-phone": ("changed", NARROW, "Ranks and modules by step", "All that differs there"),
}


def write_reports(folder: Path) -> dict[str, str]:
    """Run the trainings, and return the pages of their reports."""
    (folder / "train.py").write_text(NOISY)
    d9m(folder, "repeat -n 3 -- python train.py")
    d9m(folder, "report d9m-runs/000 -o noisy.html")
    (folder / "train.py").write_text(TRANSFORMER)
    for name, variables in (("reference", {}), ("changed", {"CHANGE": "1"})):
        control = {"LIGHTNING_D9M": "1", "LIGHTNING_D9M_LEDGER_DIR": name}
        subprocess.run(
            [sys.executable, "train.py"],
            cwd=folder,
            env=os.environ | {"LIGHTNING_D9M_PROBES": PROBES} | control | variables,
            check=True,
        )
    d9m(folder, "report reference changed -o changed.html")
    pages = {name: (folder / f"{name}.html").read_text() for name in ("noisy", "changed")}
    return {name: page.replace(f"{folder.resolve()}/", "") for name, page in pages.items()}


def d9m(folder: Path, command: str) -> None:
    """Run a command of d9m, which finds that runs differ."""
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"LIGHTNING_D9M_PROBES": PROBES, "PATH": binaries}
    words = [sys.executable, "-m", "lightning_d9m", *command.split()]
    subprocess.run(words, cwd=folder, env=environment, check=False)


def photograph(page: str, width: int, folder: Path) -> Image.Image:
    """Return a picture of the page without the empty space below it."""
    (folder / "page.html").write_text(page)
    command = [shutil.which("chromium") or "chromium", "--headless", "--no-sandbox"]
    command += ["--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--window-size={width},{HEIGHT}", f"--screenshot={folder / 'page.png'}"]
    subprocess.run([*command, f"file://{folder}/page.html"], check=True, capture_output=True)
    picture = Image.open(folder / "page.png").convert("RGB")
    blank = Image.new("RGB", picture.size, picture.getpixel((0, HEIGHT - 1)))
    _, _, _, bottom = ImageChops.difference(picture, blank).getbbox()
    return picture.crop((0, 0, width, min(bottom + 16, HEIGHT)))


def keep_sections(page: str, first: str, end: str) -> str:
    """Return the page with the sections from one heading up to but without another."""
    sections = page.split("<section>")
    titles = [section.partition("</h2>")[0].removeprefix("<h2>") for section in sections]
    begin = titles.index(first) if first else 0
    kept = sections[begin : titles.index(end)]
    head = sections[0].partition("<main>")[0] + "<main>" if begin else ""
    _, script, tail = sections[-1].partition("</main><script>")
    return head + "<section>".join(["", *kept] if begin else kept) + script + tail


def main() -> None:
    """Write the pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pages = write_reports(folder)
        for picture, (report, width, first, end) in PICTURES.items():
            shown = photograph(keep_sections(pages[report], first, end), width, folder)
            path = IMAGES / f"{picture}.png"
            shown.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
            sys.stdout.write(f"{path} {shown.size}\n")
        if len(sys.argv) > 1:
            for report, page in pages.items():
                Path(sys.argv[1], f"{report}.html").write_text(page)


if __name__ == "__main__":
    main()
