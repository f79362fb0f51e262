"""Writes a picture of the first screen of a report: of published records, in a headless chromium.

python benchmarks/screenshot.py docs/report.png
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = ROOT / "published" / "h100x2" / "captured"
WIDTH, HEIGHT, NUM_COLORS = 1280, 840, 48  # the answers, the speed-up and the efficiency


def take_screenshot(picture: Path) -> None:
    """Write the picture. Raises CalledProcessError, and FileNotFoundError without chromium."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, *EXPERIMENT.relative_to(ROOT / "published").parts)
        shutil.copytree(EXPERIMENT, folder)
        subprocess.run([sys.executable, "-m", "pipeline.collect", folder], cwd=ROOT, check=True, capture_output=True)
        look = [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
            *("--blink-settings=preferredColorScheme=1", f"--window-size={WIDTH},{HEIGHT}", "--timeout=20000"),
            *(f"--user-data-dir={scratch}/chromium", f"--screenshot={picture.resolve()}"),
            (folder / "report.html").as_uri(),
        ]
        subprocess.run(look, check=True, capture_output=True)
    with Image.open(picture) as taken:
        small = taken.convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE)
    small.save(picture, optimize=True)


if __name__ == "__main__":
    take_screenshot(Path(sys.argv[1]))
