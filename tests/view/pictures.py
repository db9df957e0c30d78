"""Pictures of the documentation, of a run of the quick start: `python -m tests.view.pictures runs/quickstart`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import posttrain as pt
from posttrain.tracking.notebook import svg_curve
from posttrain.tracking.records import points
from posttrain.view.folder import RunFolder
from posttrain.view.indexer import Indexer, index_all
from posttrain.view.serve import viewed
from tests.view.chromium import Chromium
from tests.view.helpers import served

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "pictures"
WIDTH, HEIGHT, SCALE = 1000, 570, 1.5
READY = "document.querySelector('main')?.getAttribute('aria-busy') === 'false'"
VIEWS = {
    "curves": ("curves?stage={stage}", "document.querySelectorAll('.chart canvas').length > 1"),
    "rollouts": ("rollouts?stage={stage}&sort=advantage", "document.querySelectorAll('tbody tr').length > 5"),
}
"""Address of each picture, and what is drawn in it."""


def draw_curve(run: Path, file: Path, name: str = "reward") -> None:
    """Write a curve of the run's last stage as SVG on a page of its own colour."""
    result = pt.attach(run)
    rows = [row for row in result.metrics if row["stage"] == result.stages[-1]]
    drawn = svg_curve(name, points(rows, name))
    file.write_text(drawn.replace("<svg ", '<svg style="background:#ffffff;color:#1b1f24" ', 1) + "\n")


def draw_views(page: Chromium, address: str, stage: str, folder: Path) -> None:
    """Write a picture of each view."""
    for name, (view, drawn) in VIEWS.items():
        page.open(f"{address}#{view.format(stage=stage)}", width=WIDTH)
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": SCALE, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        page.call("Emulation.setScrollbarsHidden", hidden=True)
        page.wait(f"{READY} && {drawn}")
        page.screenshot(folder / f"{name}.png")


def main(run: Path, folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw_curve(run, folder / "reward.svg")
    stage = pt.attach(run).stages[-1]
    browsed = viewed(run.name, RunFolder(run.resolve()))
    index_all([Indexer(browsed.folder, browsed.index)])
    with tempfile.TemporaryDirectory() as profile, served([browsed]) as address, Chromium(Path(profile)) as page:
        draw_views(page, address, stage, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
