"""Debian's chromium, headless: what a page looks like to a browser, at a given width and in a given theme."""

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium; apt-get install chromium")
PDFTOTEXT = shutil.which("pdftotext")
needs_pdftotext = pytest.mark.skipif(PDFTOTEXT is None, reason="needs pdftotext; apt-get install poppler-utils")

PROBE = """<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe style="width:{width}px;height:2000px;border:0" src="{address}"></iframe>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {{
  const page = frame.contentDocument, style = (element) => frame.contentWindow.getComputedStyle(element);
  const height = page.body.scrollHeight;
  page.querySelectorAll("details:not(.long)").forEach((part) => part.setAttribute("open", ""));
  const plots = [...page.querySelectorAll(".picture")].filter((plot) => plot.getBoundingClientRect().width > 0);
  const follow = (link) => {{
    const address = link.getAttribute("href"), place = page.getElementById(address.slice(1));
    if (address.startsWith("data:")) return [link.download, atob(address.split(",")[1]).length];
    if (!address.startsWith("#") || !place) return [address, 0];
    link.click();
    place.closest("details")?.setAttribute("open", "");  // the browser does so too, a little later
    return [address, place.getBoundingClientRect().height];
  }};
  const copies = (button) => {{
    let copied = "";
    page.execCommand = () => {{ copied = page.querySelector("body > textarea").value; }};
    button.click();
    return [button.closest("[data-copy]").nextElementSibling.querySelector("table").id, copied];
  }};
  const result = document.createElement("pre");
  result.textContent = JSON.stringify({{
    page_width: page.documentElement.scrollWidth,
    background: style(page.body).backgroundColor,
    text: page.body.textContent,
    foreign: page.querySelectorAll("script[src], iframe, object, img, link").length,
    num_rows: page.querySelectorAll("tr").length,
    height,
    alternatives: plots.map((plot) => plot.ariaLabel),
    titles: plots.map((plot) => style(plot.querySelector("text[font-weight=bold], text")).fill),
    scales: plots.map((plot) => plot.getBoundingClientRect().width / plot.firstElementChild.viewBox.baseVal.width),
    latex: [...page.querySelectorAll("[data-copy] button")].filter((part) => part.textContent === "LaTeX").map(copies),
    followed: [...page.querySelectorAll("a")].map(follow),
  }});
  document.body.replaceChildren(result);
}};
</script>
"""
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run")
OWN_REQUESTS = re.compile(r"google(apis)?\.com[:/]")  # of the browser, which no page causes


@contextmanager
def serve(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder, also as a proxy. Yields its address and what was asked for: paths, and addresses elsewhere."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            if self.path == "/favicon.ico":  # the browser asks by itself
                self.send_response(204)
                self.end_headers()
                return
            asked.append(self.path)
            super().do_GET()

        def do_CONNECT(self) -> None:
            asked.append(self.path)
            self.send_error(502)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def look_at(page: Path, scratch: Path, width: int = 1280, is_dark: bool = False) -> dict[str, Any]:
    """Return what the browser finds on the page, the messages on its console, and what it asked the server for.

    `followed` has each link with what it leads to on the page or holds: a height in pixels or a length; else 0.
    `latex` has what the button of each table copies, by the table's id.
    """
    assert CHROMIUM is not None
    (page.parent / "probe.html").write_text(PROBE.format(width=width, address=quote(page.name)))
    with serve(page.parent) as (address, asked):
        done = subprocess.run(
            [
                *(CHROMIUM, *FLAGS, "--enable-logging=stderr"),
                f"--user-data-dir={scratch}",
                *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
                f"--proxy-server={address}",  # so that a request to another place is seen too
                f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
                *("--window-size=1400,2000", "--timeout=20000", "--dump-dom", f"http://{address}/probe.html"),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
    text = done.stdout.partition("<pre>")[2].partition("</pre>")[0]
    assert text, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(text))
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found["followed"], found["latex"] = dict(found["followed"]), dict(found["latex"])
    return {
        **found,
        "console": console,
        "asked": [path for path in asked if path != "/probe.html" and not OWN_REQUESTS.search(path)],
    }


def print_page(page: Path, scratch: Path) -> list[list[str]]:
    """Print the page as a PDF, and return the lines of each sheet."""
    assert CHROMIUM is not None
    assert PDFTOTEXT is not None
    pdf = scratch / "page.pdf"
    profile = f"--user-data-dir={scratch / 'profile'}"
    command = [CHROMIUM, *FLAGS, profile, "--no-pdf-header-footer", f"--print-to-pdf={pdf}", page.resolve().as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    text = subprocess.run([PDFTOTEXT, "-layout", pdf, "-"], check=True, capture_output=True, text=True).stdout
    sheets = text.removesuffix("\f").split("\f")
    return [[line.strip() for line in sheet.splitlines() if line.strip()] for sheet in sheets]
