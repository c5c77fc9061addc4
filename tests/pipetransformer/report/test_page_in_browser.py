"""The page of a run in a browser: all is drawn, and names stay text."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from pipetransformer.report.page import write_page
from tests.pipetransformer.report.test_page import evil_run, figures_in, page_of

_BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
_FOUND = next(filter(None, map(shutil.which, _BROWSERS)), None)

pytestmark = pytest.mark.skipif(
    _FOUND is None, reason=f"none of {', '.join(_BROWSERS)} is installed"
)


def opened(page: Path, folder: Path) -> str:
    """Open a page for 12 seconds of its own time; return what it then holds.

    An error, or something refused by the page's policy, would be said on the console.
    """
    assert _FOUND is not None
    command = [
        _FOUND,
        "--headless",
        "--no-sandbox",  # Which containers lack.
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr",
        "--virtual-time-budget=12000",
        "--dump-dom",
        page.as_uri(),
    ]
    # A browser has processes of its own, which would outlive it.
    browser = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        dom, said = browser.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)
    assert browser.returncode == 0, said
    assert not re.findall(r"CONSOLE.*", said)
    return dom


def test_all_figures_are_drawn_and_names_are_text(tmp_path: Path) -> None:
    folder = evil_run(tmp_path / "run")
    write_page(folder)
    dom = opened(folder / "report.html", tmp_path)
    drawn = re.findall(r'<div class="figure js-plotly-plot" id="figure-\d-\d"', dom)
    assert len(drawn) == len(figures_in(page_of(folder))) == 6
    # Every figure has its curves or bars, and not its axes alone.
    assert len(re.findall(r'<g class="(?:lines|points)">', dom)) >= len(drawn)
    assert "<title>run</title>" in dom and "<img" not in re.sub(
        r"(?s)<script.*?</script>", "", dom
    )
