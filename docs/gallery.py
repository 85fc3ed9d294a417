"""Draw the pictures of gallery.md again: `python docs/gallery.py FOLDER`, which has `pets` and `nuclei`.

Runs the page's commands, one after the other, and takes each picture from the file that its title names.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

DOCS = Path(__file__).parent
WIDTH = 1100  # pixels at most, of either side
BROWSER = ("chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,1150")


def main(data: Path, only: str) -> None:
    """Run the commands below headings that begin with `only`, and write their pictures."""
    with TemporaryDirectory() as folder:
        for section in (DOCS / "gallery.md").read_text("utf-8").split("\n## ")[1:]:
            if section.startswith(only):
                commands = re.findall(r"^effloop .*", section, re.MULTILINE)
                for command in commands:
                    words = shlex.split(command.replace("/data/", f"{data.absolute()}/"))
                    subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True)
                for name, source in re.findall(r"\]\((pictures/\S+) \"(\S+)\"\)", section):
                    draw(Path(folder, source), DOCS / name)


def draw(source: Path, picture: Path) -> None:
    """Write a picture that is small in a repository: photographs as JPEG, charts with a palette."""
    if source.suffix == ".html":
        shot = source.with_suffix(".png")
        subprocess.run([*BROWSER, f"--screenshot={shot}", source.absolute().as_uri()], check=True, capture_output=True)
        source = shot
    image = Image.open(source).convert("RGB")
    image = image.crop((0, 0, image.width, min(image.height, round(1.19 * image.width))))  # the top of a long one
    image.thumbnail((WIDTH, WIDTH), Image.Resampling.LANCZOS)
    if picture.suffix == ".png":
        image = image.quantize(128, dither=Image.Dither.NONE)
    image.save(picture, optimize=True, quality=70)
    print(picture, image.size, picture.stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
