"""What has to be true of the page however it is used: names, contrast, no strangers."""

from tests.browser import Browser

# Roles that are worked with, so that each needs a name.
_WORKED_WITH = {
    "button", "textbox", "combobox", "checkbox", "spinbutton", "link", "region", "meter", "img",
    "image",
}  # fmt: skip

# WCAG 2.2, 1.4.3 and 1.4.11: relative luminance, and the ratio of text to what lies behind it.
_CONTRAST = """
(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], [x, y, z]) =>
    [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a), 1];
  const behind = (node) => {
    const color = node ? rgba(getComputedStyle(node).backgroundColor) : [255, 255, 255, 1];
    return !node || color[3] === 1 ? color : over(color, behind(node.parentElement));
  };
  const luminance = (color) => {
    const [r, g, b] = color.slice(0, 3).map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    const text = walker.currentNode.data.trim();
    if (!text || !parent.checkVisibility() || parent.closest("noscript, script, .unseen")) continue;
    const below = behind(parent);
    const ink = over(rgba(getComputedStyle(parent).color), below);
    const [high, low] = [luminance(ink), luminance(below)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) faint.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return faint;
})()
"""


async def check_page(browser: Browser, origin: str) -> None:
    """Raise AssertionError for a complaint of the console, a request elsewhere, a nameless control,
    faint text, or more width than the window has."""
    strangers = {url for url in browser.requests if not url.startswith(origin)}
    nameless = [
        role
        for role, name in await browser.accessible()
        if role in _WORKED_WITH and not name.strip()
    ]
    found = {
        "complaints": browser.complaints,
        "requests elsewhere": strangers,
        "controls without a name": nameless,
        "faint texts": await browser.read(_CONTRAST),
        "pixels too wide": max(
            0, await browser.read("document.documentElement.scrollWidth - innerWidth")
        ),
    }
    assert not any(found.values()), found
