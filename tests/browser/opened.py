"""A page in the browser, with all its requests and errors recorded."""

from __future__ import annotations

import time
from urllib.parse import urlencode, urlsplit

from playwright.sync_api import BrowserContext, ConsoleMessage, Locator, Request, Route

LOOPBACK = {"127.0.0.1", "localhost", "[::1]", "::1"}
LOCAL_SCHEMES = {"data", "blob", "file", "about"}
# No open request and nothing busy, for two frames: the page may send a request in the frame in which an answer arrives. The grid
# of heads requests the next layer when it has drawn one.
QUIET = """async () => {
  for (let i = 0; i < 2; i++) {
    if (document.querySelector('[aria-busy=true]')) return false;
    if (document.querySelector('.head:not(.here)') && !document.querySelector('.error')) return false;
    await new Promise(requestAnimationFrame);
  }
  return true;
}"""


class Opened:
    """A context with one page; `complaints` and `outside` must be empty at the end, see `check`."""

    def __init__(self, context: BrowserContext, address: str, script: str = "") -> None:
        self.context, self.address = context, address
        self.complaints: list[str] = []
        self.outside: list[str] = []
        self.asked: list[str] = []
        self.waiting: set[Request] = set()
        context.set_default_timeout(30_000)
        context.route("**/*", self._route)
        if script:
            context.add_init_script(script)
        self.page = context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", self._request)
        self.page.on("requestfinished", lambda request: self.waiting.discard(request))
        self.page.on("requestfailed", lambda request: self.waiting.discard(request))

    def _route(self, route: Route) -> None:
        if is_local(route.request.url):
            route.continue_()
        else:
            route.abort()

    def _request(self, request: Request) -> None:
        self.asked.append(request.url)
        self.waiting.add(request)
        if not is_local(request.url):
            self.outside.append(request.url)

    def _console(self, message: ConsoleMessage) -> None:
        # Only tests read pixels; the page does not.
        if message.type in ("error", "warning") and "willReadFrequently" not in message.text:
            self.complaints.append(f"{message.type}: {message.text}")

    def check(self) -> None:
        assert not self.outside, f"requests left this machine: {self.outside}"
        assert not self.complaints, f"the page complains: {self.complaints}"

    def go(self, **state: str | int) -> None:
        self.page.goto(f"{self.address}#{urlencode(state)}")
        if self.address == "about:blank":
            return
        self.page.wait_for_selector("[role=tab], .error")
        self.settle()

    def settle(self, seconds: float = 30) -> None:
        """Wait until all requests of the page are answered."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self.waiting and self.page.evaluate(QUIET) and not self.waiting:
                return
            self.page.wait_for_timeout(10)
        raise AssertionError(f"after {seconds} s the page still waits for {[one.url for one in self.waiting]}")

    def state(self) -> dict[str, str]:
        """The state in the address; the page writes it a moment after a change."""
        self.page.wait_for_timeout(250)
        return self.page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")

    def tab(self, panel: str) -> Locator:
        self.page.click(f"#tab-{panel}")
        self.settle()
        return self.panel

    def choose(self, words: str) -> None:
        """Choose one of several radio options."""
        self.panel.get_by_role("radio", name=words, exact=True).check()
        self.settle()

    def type(self, text: str, label: str = "Text") -> None:
        """Replace the text, and wait for the answers."""
        with self.page.expect_response("**/explore/read"):
            self.page.get_by_label(label, exact=True).fill(text)
        self.settle()

    @property
    def panel(self) -> Locator:
        return self.page.locator("#panel")

    @property
    def errors(self) -> list[str]:
        return self.page.locator(".error").all_inner_texts()

    def tokens(self, side: str = "Input") -> list[str]:
        return self.page.locator(f"[aria-label='{side} tokens'] [role=option]").all_text_contents()

    def picture(self, canvas: Locator) -> str:
        """The content of a canvas, for comparison."""
        return canvas.evaluate("c => c.toDataURL()")

    def colours(self, canvas: Locator) -> int:
        """The number of different colours of a canvas; 1 if it is empty."""
        return canvas.evaluate(
            """c => new Set(new Uint32Array(
                 c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"""
        )


def is_local(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in LOCAL_SCHEMES or parts.hostname in LOOPBACK
