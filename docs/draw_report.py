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
WIDE, NARROW, HEIGHT = 1100, 400, 6000
# Of each picture: the width of the window, and the first heading that it leaves out.
PICTURES = {
    "report-desktop": (WIDE, "Comparison"),
    "report-phone": (NARROW, "What ran"),
}


def write_report(folder: Path) -> str:
    """Run the trainings, and return the page of their report."""
    (folder / "train.py").write_text(NOISY)
    d9m(folder, "repeat -n 3 -- python train.py")
    d9m(folder, "report d9m-runs/000")
    return (folder / "report.html").read_text().replace(f"{folder.resolve()}/", "")


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


def cut_page(page: str, end: str) -> str:
    """Return the page with the sections before a heading."""
    kept, _, _ = page.partition(f"<section><h2>{end}</h2>")
    return f"{kept}</main></body></html>"


def main() -> None:
    """Write the pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = write_report(folder)
        for picture, (width, end) in PICTURES.items():
            shown = photograph(cut_page(page, end), width, folder)
            path = IMAGES / f"{picture}.png"
            shown.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
            sys.stdout.write(f"{path} {shown.size}\n")


if __name__ == "__main__":
    main()
