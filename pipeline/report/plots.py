"""Plots as SVG, for the page and as files. Imports matplotlib, so import it only where a plot is made.

`draw_panels` draws with a placeholder colour for each role. `recolour` then puts in CSS variables for the page, which
has a light and a dark theme, or real colours for a file.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

from pipeline.report.draw_panels import (
    BUCKET,
    DASHES,
    FONT_SIZE,
    LIGHT,
    PLACEHOLDERS,
    draw_panel,
    role_of,
    size_of,
)
from pipeline.report.plot_data import REFERENCE, KeyEntry, Plot

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
FONTS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
GAP = 16  # between the panels of a file

ROLES = {placeholder: role for role, placeholder in PLACEHOLDERS.items()}
MARKER_PATHS = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
    "M-3.2 -3.2h6.4v6.4h-6.4z",
    "M0 -3.8L3.6 3.2H-3.6z",
    "M0 -4.2L4.2 0L0 4.2L-4.2 0z",
    "M0 3.8L3.6 -3.2H-3.6z",
    "M-1.2 -3.6h2.4v2.4h2.4v2.4h-2.4v2.4h-2.4v-2.4h-2.4v-2.4h2.4z",
    "M-3.6 -3.6h2.2L0 -2.2L1.4 -3.6H3.6v2.2L2.2 0L3.6 1.4V3.6H1.4L0 2.2L-1.4 3.6H-3.6V1.4L-2.2 0L-3.6 -1.4z",
    "M0 -3.8L3.3 -1.9V1.9L0 3.8L-3.3 1.9V-1.9z",
)

ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", XLINK)


class RenderedPlot(NamedTuple):
    """A plot as SVG: for the page its panels and key, an entry a label with its drawing; and the whole as a file."""

    plot: Plot
    panels: list[str]
    key: list[tuple[str, str]]
    file: bytes


def render_plot(plot: Plot) -> RenderedPlot:
    """Return the plot as SVG for the page, in its colours, and as a file, in its own."""
    pictures = [draw_panel(panel) for panel in plot.panels]
    panels = []
    for index, (panel, picture) in enumerate(zip(plot.panels, pictures, strict=True)):
        name = f"{plot.name}-{index}"
        element = recolour(picture, by_variable, name)
        add_description(element, panel.title, panel.describe(), name)
        panels.append(to_text(element))
    key = [(entry.label, swatch(entry, by_variable)) for entry in plot.key()]
    return RenderedPlot(plot, panels, key, render_file(plot, pictures))


def render_file(plot: Plot, pictures: Sequence[bytes]) -> bytes:
    """Return the plot as one SVG file: its key, and its panels in rows of three, four in rows of two, on white."""
    drawn = [recolour(picture, LIGHT.__getitem__, f"{plot.name}-{index}") for index, picture in enumerate(pictures)]
    sizes = [size_of(panel) for panel in plot.panels]
    step = 2 if len(drawn) == 4 else 3
    rows = [list(zip(drawn, sizes, strict=True))[start : start + step] for start in range(0, len(drawn), step)]
    width = max(sum(size[0] for _, size in row) + GAP * (len(row) - 1) for row in rows)
    key, y = draw_key(plot, width)
    root = ElementTree.Element(f"{{{SVG}}}svg")
    for row in rows:
        x = 0
        for element, (panel_width, panel_height) in row:
            element.attrib |= {"x": f"{x}", "y": f"{y}", "width": f"{panel_width}", "height": f"{panel_height}"}
            x += panel_width + GAP
        y += max(size[1] for _, size in row) + GAP
    height = y - GAP
    root.attrib |= {"viewBox": f"0 0 {width} {height}", "width": f"{width}", "height": f"{height}"}
    add_description(root, plot.title, " ".join(panel.describe() for panel in plot.panels), plot.name)
    ground = {"width": "100%", "height": "100%", "fill": LIGHT["--bg"]}
    ElementTree.SubElement(root, f"{{{SVG}}}rect", ground)
    root.extend([*key, *(element for row in rows for element, _ in row)])
    return to_text(root).encode() + b"\n"


def by_variable(role: str) -> str:
    """Return the CSS variable of a role; text has the colour of the page's text."""
    return "currentColor" if role == "--fg" else f"var({role})"


def recolour(picture: bytes, colour: Callable[[str], str], prefix: str) -> ElementTree.Element:
    """Return matplotlib's SVG without its style sheet, metadata, size and fonts, and with colours and ids replaced.

    Styles become attributes: the page's content policy allows no style in an element.
    """
    root = ElementTree.fromstring(picture)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == f"{{{SVG}}}metadata" or child.find(f"{{{SVG}}}style") is not None:
                parent.remove(child)
    used = set(re.findall(r'(?:url\(|href=")#(\w+)', picture.decode()))
    for element in root.iter():
        element.attrib |= attributes_of_style(element.attrib.pop("style", ""))
        name = element.attrib.pop("id", None)
        if name in used:
            element.set("id", f"{prefix}-{name}")
        for attribute, value in element.attrib.items():
            if value in ROLES:
                element.set(attribute, colour(ROLES[value]))
            elif "#" in value:
                element.set(attribute, value.replace("#", f"#{prefix}-"))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"font-family": FONTS, "stroke-linejoin": "round", "stroke-linecap": "butt"}
    return root


def add_description(element: ElementTree.Element, title: str, text: str, prefix: str) -> None:
    """Add a text alternative to an SVG element."""
    parts = {"title": title, "desc": text}
    for index, (name, content) in enumerate(parts.items()):
        part = ElementTree.Element(f"{{{SVG}}}{name}", {"id": f"{prefix}-{name}"})
        part.text = content
        element.insert(index, part)
    element.attrib |= {"role": "img", "aria-labelledby": " ".join(f"{prefix}-{name}" for name in parts)}


def attributes_of_style(style: str) -> dict[str, str]:
    """Return the declarations of a style as attributes. Of a font only its size and weight are kept."""
    pairs = (tuple(text.strip() for text in part.split(":", 1)) for part in style.split(";") if ":" in part)
    declared = {name: value for name, value in pairs if not name.startswith("-")}
    font = declared.pop("font", "")
    if size := re.search(r"([\d.]+)px", declared.pop("font-size", font)):
        declared["font-size"] = size[1]
    if "bold" in font or declared.get("font-weight") in ("bold", "700"):
        declared["font-weight"] = "bold"
    declared.pop("font-family", None)
    return declared


def draw_key(plot: Plot, width: int) -> tuple[list[ElementTree.Element], int]:
    """Return the key of a file, in as many columns as fit, and its height."""
    entries = [(entry.label, swatch(entry, LIGHT.__getitem__)) for entry in plot.key()]
    if not entries:
        return [], 0
    column = 44 + max(len(label) for label, _ in entries) * 6.5
    num_columns = max(1, int(width // column))
    group = ElementTree.Element(f"{{{SVG}}}g", {"font-family": FONTS, "font-size": f"{FONT_SIZE}"})
    for index, (label, drawing) in enumerate(entries):
        x, y = column * (index % num_columns), 16 + 18 * (index // num_columns)
        item = ElementTree.SubElement(group, f"{{{SVG}}}g", {"transform": f"translate({x:.0f} {y})"})
        item.append(ElementTree.fromstring(drawing))
        text = ElementTree.SubElement(item, f"{{{SVG}}}text", {"x": "36", "y": "4", "fill": LIGHT["--fg"]})
        text.text = label
    return [group], 16 + 18 * math.ceil(len(entries) / num_columns)


def swatch(entry: KeyEntry, colour: Callable[[str], str]) -> str:
    """Return a piece of a line with its marker, or a part's colour, in a box of 32 x 10 px around (16, 0)."""
    style, painted = entry.style, colour(role_of(entry.style))
    if entry.kind == "part":
        return f'<g xmlns="{SVG}"><path d="M8 -5H24V5H8z" fill="{painted}"/></g>'
    if entry.kind == "hollow":
        ring = f'<path d="{MARKER_PATHS[0]}" transform="translate(16 0)" fill="{colour("--bg")}" stroke="{painted}"/>'
        return f'<g xmlns="{SVG}">{ring}</g>'
    if entry.kind == "markers":
        shape = f'<path d="{MARKER_PATHS[BUCKET]}" transform="translate(16 0)" fill="none" stroke="{painted}"/>'
        return f'<g xmlns="{SVG}">{shape}</g>'
    dashes = (
        ' stroke-dasharray="3 3"' if style == REFERENCE else "" if DASHES[style] == "-" else ' stroke-dasharray="9 4"'
    )
    line = f'<path d="M1 0H31" stroke="{painted}" stroke-width="2"{dashes}/>'
    marker = f'<path d="{MARKER_PATHS[style]}" transform="translate(16 0)" fill="{painted}"/>'
    return f'<g xmlns="{SVG}">{line}{"" if style == REFERENCE else marker}</g>'


def to_text(element: ElementTree.Element) -> str:
    """Return an SVG element as text, without the whitespace between elements."""
    for part in element.iter():
        part.tail = None
        if part.text is not None and not part.text.strip():
            part.text = None
    return ElementTree.tostring(element, encoding="unicode")
