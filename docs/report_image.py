"""The picture of a report in README.md: python docs/report_image.py [RUN], which `make docs-images` calls.

Without a run, the quickstart's. Needs the extras `dev` and `plots`, and a Chromium.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import fedspa
from fedspa.report import write
from fedspa.runs.config import load

IMAGE = Path(__file__).parent / "images" / "report.png"
WIDTH = 1160


def main(run: Path | None) -> None:
    """From the top of the page to the end of the figures by round."""
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        if run is None:
            run = Path(scratch) / "quickstart"
            fedspa.run(load(None, [f"run.out={str(run)!r}"]), progress=False)
        page_file = Path(scratch) / "report.html"
        write(run, page_file)
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page(viewport={"width": WIDTH, "height": 800}, color_scheme="light")
        page.goto(page_file.as_uri())
        box = page.locator(".grid").bounding_box()
        assert box is not None
        IMAGE.parent.mkdir(exist_ok=True)
        end = box["y"] + box["height"] + 24
        shot = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": end})
        browser.close()
    # A palette is enough for a page of few colours, and a third of the bytes.
    Image.open(BytesIO(shot)).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(IMAGE, optimize=True)
    print(f"{IMAGE}: {IMAGE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
