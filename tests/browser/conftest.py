"""A real browser that may reach this machine only, and a real JupyterLab for it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.processes import marked_environment, new_mark, processes_with, stop

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
WINDOW = {"width": 1400, "height": 1000}
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def stays_here(url: str) -> bool:
    """Whether a request ends on this machine."""
    parts = urlsplit(url)
    return parts.scheme in ("data", "blob", "file", "about") or parts.hostname in LOOPBACK


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Debian's Chromium, driven by Playwright; skips where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api")
    executable = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if executable is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUMS)} is installed (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, headless=True, args=ARGUMENTS)
        yield chromium
        chromium.close()


@dataclass
class Visit:
    """One page, with what it asked for outside this machine and what went wrong in it."""

    page: object
    left: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@pytest.fixture
def visit(browser, request: pytest.FixtureRequest, screenshots: Path) -> Iterator[Visit]:
    """A fresh page; the test fails where anything asks for something outside loopback. Parametrise it with "dark"."""
    theme = getattr(request, "param", "light")
    context = browser.new_context(viewport=WINDOW, color_scheme=theme)
    visit = Visit(context.new_page())

    def guard(route) -> None:
        if stays_here(route.request.url):
            route.continue_()
        else:
            visit.left.append(route.request.url)
            route.abort()

    context.route("**/*", guard)
    visit.page.on("websocket", lambda socket: stays_here(socket.url) or visit.left.append(socket.url))
    # Plotly rejects the promise of an animation that another one interrupts, without a reason: "undefined".
    visit.page.on("pageerror", lambda error: str(error) == "undefined" or visit.errors.append(str(error)))
    yield visit
    visit.page.screenshot(path=screenshots / f"{re.sub(r'[^a-z0-9]+', '-', request.node.name.lower()).strip('-')}.png")
    context.close()
    assert visit.left == [], "the page asked for something outside this machine"


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where each test leaves a picture of how its page looked at the end."""
    folder = Path(os.environ.get("VIZKIT_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    print(f"\nscreenshots: {folder}")


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab, and the folder that it shows."""

    url: str
    token: str
    folder: Path

    def address_of(self, notebook: str) -> str:
        return f"{self.url}/lab/tree/{notebook}?reset&token={self.token}"


@pytest.fixture(scope="session")
def lab(browser, tmp_path_factory: pytest.TempPathFactory, repository_notebooks: Path) -> Iterator[Lab]:
    """JupyterLab on a free loopback port, on a copy of the notebooks, with the settings of `make lab` and no others."""
    home = tmp_path_factory.mktemp("lab")
    folder = home / "notebooks"
    shutil.copytree(repository_notebooks, folder)
    settings = home / "config" / "labconfig"
    settings.mkdir(parents=True)
    shutil.copy(repository_notebooks.parent / ".ci" / "page_config.json", settings)  # as .ci/setup does for `make lab`
    mark, token = new_mark(), secrets.token_hex(16)
    environment = marked_environment(mark) | {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "IPYTHONDIR": str(home / "ipython"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(repository_notebooks.parent), os.environ.get("PYTHONPATH")])),
    }
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"),
        f"--ServerApp.root_dir={folder}",
        f"--IdentityProvider.token={token}",
        "--LabApp.expose_app_in_browser=True",
    ]
    server = subprocess.Popen(
        command, env=environment, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        url = wait_for_address(server)
        yield Lab(url, token, folder)
    finally:
        stop(processes_with(mark))
        server.wait()


@pytest.fixture(scope="session")
def repository_notebooks() -> Path:
    return Path(__file__).parents[2] / "notebooks"


def wait_for_address(server: subprocess.Popen[str], *, within_s: float = 60) -> str:
    """The address that the server prints; what it says later is read away, so that it never blocks."""
    watchdog = threading.Timer(within_s, server.kill)
    watchdog.start()
    said = []
    for line in server.stdout:
        said.append(line)
        if found := re.search(r"(http://127\.0\.0\.1:\d+)/lab", line):
            watchdog.cancel()
            threading.Thread(target=server.stdout.read, daemon=True).start()
            return found.group(1)
    raise RuntimeError("JupyterLab did not start:\n" + "".join(said[-30:]))
