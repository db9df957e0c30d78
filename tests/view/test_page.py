"""Page in headless Chromium: every view draws, text of a model stays text, and nothing is wider than the window."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.view.serve import Viewed
from tests.view.chromium import Chromium, browser
from tests.view.helpers import GROUP, PROMPTS, STAGE, UNSAFE, indexed, make_run, make_sft_run, served
from tests.view.pictures import FOLDER, VIEWS, draw_curve, draw_views

pytestmark = pytest.mark.skipif(browser() is None, reason="no Chromium: apt-get install chromium")

STEPS = range(1, 5)
READY = "document.querySelector('main')?.getAttribute('aria-busy') === 'false'"
DRAWN = {
    "curves": "document.querySelectorAll('.chart canvas').length === 3",
    "rollouts": f"document.querySelectorAll('tbody tr').length === {PROMPTS * GROUP * len(STEPS) + 2}",
    "prompts": f"document.querySelectorAll('.cells').length === {PROMPTS}",
    "compare": "document.querySelectorAll('.sample').length > 0",
    "settings": "document.querySelectorAll('tbody tr').length > 5",
    "rollout?run=0&id=1": "document.querySelectorAll('.tokens span').length > 0",
}
"""Views by their address, and what stands in each."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Viewed]]:
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield indexed(*(make_run(folder / name, STEPS, completion=UNSAFE) for name in ("a", "b")))


@pytest.fixture(scope="module")
def address(runs: list[Viewed]) -> Iterator[str]:
    with served(runs) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["wide light", "narrow dark"])
def test_every_view_draws_and_fits(page: Chromium, address: str, width: int, dark: bool) -> None:
    """Red if a table is not inside a box of its own that scrolls, if a script fails or breaks the policy, or if a view
    sets HTML: the completion is markup that would change the title."""
    backgrounds = set()
    for view, drawn in DRAWN.items():
        page.open(f"{address}#{view}", width=width, dark=dark)
        page.wait(f"{READY} && {drawn}")
        assert page.value("document.documentElement.scrollWidth") <= width, view
        assert page.value("document.querySelectorAll('main img, main script').length") == 0, view
        assert page.value("document.title") == "posttrain view"
        backgrounds.add(page.value("getComputedStyle(document.body).backgroundColor"))
    assert UNSAFE in page.value("document.querySelector('.piece.sampled pre').textContent")
    assert backgrounds == {"rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)"}
    assert page.errors == []


def test_search_sort_and_a_rollout(page: Chromium, address: str) -> None:
    page.open(f"{address}#rollouts")
    page.wait(f"{READY} && {DRAWN['rollouts']}")
    page.value(
        "(() => { const field = document.querySelector('.wide input'); field.value = '> 3';"
        "field.dispatchEvent(new Event('change')); })()"
    )
    page.wait(f"{READY} && document.getElementById('count').textContent === '1 to 6 of 6'")
    page.value("[...document.querySelectorAll('th button')].find((b) => b.textContent === 'advantage').click()")
    page.wait(f"{READY} && location.hash.includes('sort=advantage')")
    page.wait("document.querySelector('tbody tr td:nth-last-child(4)').textContent === '1.5'")
    page.value("document.querySelector('tbody tr').click()")
    page.wait(f"{READY} && location.hash.startsWith('#rollout?')")
    page.wait("document.querySelector('h2').textContent.includes('step 3')")
    page.wait("document.querySelector('#microscope button.main').textContent === 'Replay the step'")


def test_settings_and_warnings(page: Chromium, runs: list[Viewed], address: str) -> None:
    """Those that differ from the defaults, then all; a warning's text is a text."""
    told = {"stage": STAGE, "step": 3, "name": "no_signal", "summary": UNSAFE, "advice": "wait"}
    file = runs[0].folder.path / "warnings.jsonl"
    file.write_text(json.dumps(told) + "\n")
    page.open(f"{address}#settings")
    page.wait(f"{READY} && document.querySelector('ul.warnings li') !== null")
    assert UNSAFE in page.value("document.querySelector('ul.warnings').textContent")
    names = "[...document.querySelectorAll('tbody tr td:first-child')].map((cell) => cell.textContent)"
    few = page.value(names)
    page.open(f"{address}#settings?all=yes")
    page.wait(f"{READY} && document.querySelectorAll('tbody tr').length >= {len(few)}")
    assert page.value("document.querySelector('#tabs a[aria-current]').textContent") == "Settings"
    assert "output" in page.value(names) and page.errors == []
    file.unlink()


def test_pictures_of_the_documentation(page: Chromium, runs: list[Viewed], address: str, tmp_path: Path) -> None:
    draw_views(page, address, STAGE, tmp_path)
    draw_curve(runs[0].folder.path, tmp_path / "reward.svg")
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in VIEWS)
    assert "<polyline" in (tmp_path / "reward.svg").read_text()
    assert {file.name for file in FOLDER.iterdir()} == {file.name for file in tmp_path.iterdir()}


DRAWN_TEXT = """
window.texts = [];
const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
  window.texts.push(text);
  return draw.call(this, text, ...place);
};
"""
"""Remember the texts of canvases, such as the numbers of axes."""


def test_curves_can_be_read(page: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own rewards are among the first; red if 2.5 is `3`, if a constant of 1e-5 spans -1 to 1, or if words wait for
    Enter."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rollouts, plain = make_run(tmp_path / "a", STEPS), make_sft_run(tmp_path / "b")
    page.call("Page.addScriptToEvaluateOnNewDocument", source=DRAWN_TEXT)
    with served(indexed(plain, rollouts), [tmp_path / "b", tmp_path / "c"]) as address:
        page.open(f"{address}#curves?stage=0-sft")
        page.wait(f"{READY} && window.texts.includes('7.5')")
        assert {"0", "2.5", "5.0"} <= set(page.value("window.texts"))
        page.open(f"{address}#curves?stage=0-rl&metrics=rewards/low")
        page.wait(f"{READY} && window.texts.includes('0.00001')")
        assert not {"-1", "-0.5", "0.5"} & set(page.value("window.texts"))
        assert "posttrain 0.1.0, jax 0.10.2" in page.value("document.querySelector('.legend').textContent")
        titles = page.value("[...document.querySelectorAll('.legend span')].map((one) => one.title).join('')")
        assert "posttrain 0.0.9, jax 0.10.1\n" in titles and "numpy 2.4.0" in titles

        page.open(f"{address}#curves?stage=0-rl")
        page.wait(f"{READY} && document.querySelectorAll('.u-over').length === 3")
        assert page.value("document.querySelectorAll('.chart')[1].dataset.metric") == "rewards/low/mean"
        box = page.value(
            "(({x, y, width}) => [x, y, width])(document.querySelector('.u-over').getBoundingClientRect())"
        )
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + 1, y=box[1] + 20)
        page.wait("document.querySelector('.chart h3').textContent === 'reward 0.1 at step 1'")
        page.wait("document.querySelectorAll('.chart h3')[2].textContent === 'grad_norm 1 at step 1'")
        page.value(
            "(() => { const field = document.querySelector('.wide input'); field.focus(); field.value = 'norm';"
            "field.dispatchEvent(new Event('input', { bubbles: true })); })()"
        )
        page.wait("document.querySelectorAll('.chart').length === 1 && location.hash.includes('metrics=norm')")
        assert page.value("document.activeElement.value") == "norm"

        page.open(f"{address}#compare?run=0")
        page.wait(f"{READY} && document.querySelector('.pair').textContent.includes('has no rollouts')")
        page.value(
            "(() => { const run = document.querySelector('.pair select'); run.value = '1';"
            "run.dispatchEvent(new Event('change')); })()"
        )
        page.wait(f"{READY} && document.querySelectorAll('.sample').length > 0")
        make_sft_run(tmp_path / "c")
        page.wait("document.querySelectorAll('.pair select option').length >= 3")
    assert page.errors == []
