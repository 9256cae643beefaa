"""Train the smallest classifier of ultralytics on images of digits."""

import tempfile
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits
from ultralytics import YOLO

with tempfile.TemporaryDirectory() as folder:
    d = load_digits()
    for number in range(120):
        part = "train" if number < 90 else "val"
        place = Path(folder, "digits", part, str(d.target[number]))
        place.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((d.images[number] * 15).astype("uint8")).convert("RGB")
        image.resize((32, 32)).save(place / f"{number}.png")
    model = YOLO("yolo11n-cls.yaml")
    model.train(
        data=str(Path(folder, "digits")),
        epochs=2,
        imgsz=32,
        batch=16,
        device="cpu",
        workers=2,
        project=str(Path(folder, "runs")),
        plots=False,
    )
