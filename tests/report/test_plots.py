"""What plots show, worked by hand, and their SVG: deterministic, in two themes, readable by everyone."""

import itertools
import math
import re
from collections.abc import Sequence
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import msgspec
import pytest
from factories import (
    INT8_RECORDS,
    ROOT,
    assert_says,
    beside,
    comm_point,
    make_communication_record,
    make_measurement,
    make_record,
    make_spec,
    measured,
    on_gpus,
    timed,
    with_measurement,
)
from rendered import (
    bar_panel,
    batch_records,
    communication_records,
    every_question,
    labels,
    line_panel,
    plots_of,
    plots_of_records,
    published_experiment,
    scaling_records,
    timed_record,
    xs,
    ys,
)

from pipeline.records.record import Record
from pipeline.report.draw import HATCHES, LIGHT, MARKERS, METADATA, render_files, render_plot
from pipeline.report.html import build_plots
from pipeline.report.plots import (
    MARKS,
    MAX_SERIES,
    NO_BARS,
    PART_MARKS,
    REFERENCE,
    HistogramPanel,
    LinePanel,
    Plot,
    Point,
    Series,
)
from pipeline.report.step_parts import STYLES

MIN_CONTRAST = 3  # of a graphical object against its ground: WCAG 2.2, 1.4.11
MIN_TEXT_CONTRAST = 4.5  # 1.4.3


def test_q1_shows_time_throughput_and_where_memory_ends() -> None:
    plot = plots_of(*batch_records())["q1"]
    times = line_panel(plot)
    assert (times.series[0].points, times.oom_from) == ((Point(32, 12), Point(128, 5), Point(512, 4)), 2048)
    assert ys(line_panel(plot, 1).series[0]) == pytest.approx([50_000 / 12, 10_000, 12_500])
    assert "12 at 32, 4 at 512. Out of memory from 2,048 on." in times.describe()


def test_models_of_images_and_of_tokens_have_a_panel_of_throughput_each() -> None:
    found = [timed(4, size, model=model) for size in (64, 128) for model in ("resnet18", "lenet")]
    units = [with_measurement(record, unit="tokens" if record.spec.model == "lenet" else "images") for record in found]
    assert {panel.title for panel in plots_of(*units)["q1"].panels} > {"Tokens a second", "Images a second"}


def test_a_peak_at_one_batch_size_is_a_dash_where_a_line_would_have_no_length() -> None:
    lines = (Series("measured", (Point(16, 1.0),)), Series("peak", (Point(16, 4.0),), REFERENCE))
    (drawn,) = render_plot(Plot("q1", "Q1", "One GPU", (LinePanel("Tokens a second", "samples", lines),))).pictures
    assert re.search(r"d=\"M 6 0 L -6 -0 \" stroke=\"var\(--muted\)\"", drawn), "a dash of 12 points"


@pytest.mark.parametrize(
    ("counts", "names", "at", "speedups", "ideal"),
    [
        ((2, 4), ["32 per GPU", "128 per GPU", "512 per GPU"], [1, 2, 4], [1, 2 / 1.1, 4 / 1.1], [1, 2, 4]),
        ((2,), ["ddp"], [32, 128, 512], [2 / 1.1] * 3, [2, 2, 2]),
    ],
    ids=["a line from one GPU for each batch size", "with one number of GPUs against the batch size"],
)
def test_q2_shows_speed_ups(
    counts: tuple[int, ...], names: list[str], at: list[float], speedups: list[float], ideal: list[float]
) -> None:
    panel = line_panel(plots_of(*batch_records(), *scaling_records(counts))["q2"])
    assert panel.ideal is not None
    assert (labels(panel), xs(panel.series[0]), [panel.ideal(x) for x in at]) == (names, at, ideal)
    assert ys(panel.series[0]) == pytest.approx(speedups)


def test_many_gpus_stand_apart_on_logarithmic_axes() -> None:
    for counts, scale in (((2, 8), "linear"), ((2, 8, 64), "log2")):
        panel = line_panel(plots_of(*batch_records(), *scaling_records(counts))["q2"])
        assert (panel.x_scale, panel.y_scale) == (scale, scale)
    (drawn,) = render_plot(plots_of(*batch_records(), *scaling_records((2, 8, 64)))["q2"]).pictures[:1]
    assert re.findall(r">(1|2|4|8|16|64)</text>", drawn).count("16") == 1, "an axis of speed-ups that doubles"


@pytest.mark.parametrize("counts", [(2, 4), (2,)])
def test_the_ideal_is_named_right_of_the_axes_where_nothing_is_drawn(counts: tuple[int, ...]) -> None:
    """Left of a flat line an error bar of the first point crossed it."""
    (drawn,) = render_plot(plots_of(*batch_records(), *scaling_records(counts))["q2"]).pictures[:1]
    (ideal,) = re.findall(r' x="([\d.]+)"[^>]*>ideal<', drawn)
    assert float(ideal) > max(float(x) for x in re.findall(r"<use [^>]*x=\"([\d.]+)\"", drawn))


SHARED = [*beside(timed(4, 32), timed(4, 64)), timed(2.5, 32, 2), timed(2.5, 64, 2)]
TOO_FAST = [timed(4, 32), timed(4, 64), timed(1.5, 32, 2), timed(1.5, 64, 2)]


WAITING = [
    make_record(spec, measurement=make_measurement(spec, (2.0, 2 / spec.num_gpus), compute_share=0.7))
    for spec in (on_gpus(num_gpus, size) for num_gpus in (1, 2) for size in (32, 64))
]


def on_one_cpu(time_s: float, *place: int) -> Record:
    record = timed(time_s, *place, device="cpu", precision="fp32")
    return msgspec.structs.replace(record, environment=msgspec.structs.replace(record.environment, num_cpus=1))


FEW_CPUS = [on_one_cpu(4, 32), on_one_cpu(4, 64), on_one_cpu(2.5, 32, 2), on_one_cpu(2.5, 64, 2)]


@pytest.mark.parametrize(
    ("found", "flaw"),
    [
        pytest.param(SHARED, "shared node", id="against a baseline beside other points"),
        pytest.param(TOO_FAST, "superlinear", id="above N"),
        pytest.param(WAITING, "loader-bound", id="waits for data"),
        pytest.param(FEW_CPUS, "shared CPUs", id="fewer CPUs than processes"),
    ],
)
def test_a_speed_up_that_no_answer_uses_is_grey_and_the_time_itself_is_not(found: list[Record], flaw: str) -> None:
    plots = plots_of(*found)
    assert [{point.flaw for point in line_panel(plots[name]).series[0].points} for name in ("q1", "q2")] == [
        {""},
        {flaw},
    ]
    assert plots["q1"].key() == []
    assert ("○", "muted", f"not used: {flaw}") in plots["q2"].key()
    assert f"({flaw})" in line_panel(plots["q2"]).describe()
    assert_says(render_plot(plots["q2"]).pictures[0], 'fill="var(--bg)" stroke="var(--muted)"')  # the marker
    assert f">not used: {flaw}</text>" in svg_file(plots["q2"])


def test_parts_of_a_bar_are_hatched_for_a_print_without_colours_and_the_key_has_their_order() -> None:
    assert len(HATCHES) == len(PART_MARKS) == len({*HATCHES}) == len({*PART_MARKS}) == MAX_SERIES
    plot = plots_of(*every_question())["q3"]
    key = {entry.label: entry.mark for entry in plot.key()}
    assert [*key] == [part for part in STYLES if part in key]
    assert len({*key.values()}) == len(key) == len(plot.key()) >= 3
    assert "<pattern" in render_plot(plot).pictures[-1]


def test_q3_splits_a_step_by_part_and_takes_exposed_communication_out_of_backward() -> None:
    """15/16 of T are computing: copy 0.1, forward 0.3, backward 0.5, optimizer 0.1 of that. DDP's step takes 1.1 ms."""
    double = timed_record(on_gpus(2, 128), 0.24)
    panel = bar_panel(plots_of(timed_record(make_spec(), 4), double, *communication_records())["q3"])
    assert dict(zip(panel.bars, panel.totals_ms, strict=True)) == pytest.approx(
        {"single 1 GPU": 4000 / 391, "ddp 2 GPUs": 240 / 196}
    )
    on_one, on_two = ({part: values[bar] for part, values in panel.parts.items()} for bar in (0, 1))
    expected = {"waiting for data": 0.0625, "compute (cannot be split)": 0.84375, "optimizer": 0.09375}
    assert {part: share for part, share in on_one.items() if share} == pytest.approx(expected)
    exposed = 40e-6 * 196 / 0.24  # 40 us a step, of an epoch of 196 steps
    inside = on_two["compute"] + on_two.get("kernel launches", 0)
    assert (on_two["exposed communication"], inside) == pytest.approx((exposed, 0.84375 - exposed))
    assert (sum(on_one.values()), sum(on_two.values())) == pytest.approx((1, 1))


def test_lines_of_one_place_are_no_plot_and_points_without_bars_are_said() -> None:
    one = plots_of(timed(4, 128), timed(2.5, 128, 2))
    assert {"q1", "q2"}.isdisjoint(one)
    assert plots_of(*batch_records())["q1"].note.endswith("Without bars: no interval is known.")


def test_parts_are_not_fitted_to_the_step_and_what_is_counted_twice_stands_below_0() -> None:
    """Of a step of 20.7 ms 20 ms are exposed, by a measurement whose step is longer than that without the wait."""
    slow = make_communication_record(comm_point(), measured(*[20_000] * 6))
    plot = plots_of(timed_record(make_spec(), 4), timed_record(on_gpus(2, 128), 4.056), slow)["q3"]
    parts = {part: values[1] for part, values in bar_panel(plot).parts.items()}
    assert (parts["exposed communication"], sum(parts.values())) == pytest.approx((0.02 * 196 / 4.056, 1))
    assert parts["unexplained"] < -0.1
    assert plot.note == "A part below 0 says that the others are too long by as much."
    assert "unexplained -1" in plot.panels[-1].describe()


def test_a_bar_is_named_by_what_tells_it_from_a_step_within_the_noise_too() -> None:
    noisy = measured(1, -1, 0, 0, 1, -1, again_us=(300, -300, 200, -200, 100, -100))
    found = [(comm_point(bucket_cap_mb=10), measured()), (comm_point(bucket_cap_mb=50), noisy)]
    plot = plots_of(*(make_communication_record(*pair) for pair in found))["q3-communication"]
    assert bar_panel(plot).bars == ("buckets of 10 MiB",)


def test_each_kind_of_collective_is_a_line_of_its_own() -> None:
    found = published_experiment("h100x2/strategies")
    panel = line_panel({plot.name: plot for plot in build_plots(found.tables)}["q3-bandwidth"])
    assert [label.partition(",")[0] for label in labels(panel)] == [
        "isolated all-gather",
        "isolated all-reduce",
        "DDP's buckets",
        "isolated broadcast",
        "isolated reduce-scatter",
    ]
    assert all(len({*xs(line)}) == len(line.points) for line in panel.series if line.is_line)


def test_a_constant_tensor_is_one_bar() -> None:
    panel = HistogramPanel("fc1: 4 values", 0.0, 0.0, (4,), (0.0, 0.0))
    (drawn,) = render_plot(Plot("int8-weights", "int8", "Weights", (panel,))).pictures
    assert "from 0 to 0" in panel.describe()
    assert "largest 0" in drawn


@pytest.mark.parametrize(
    "found",
    [
        pytest.param([], id="no records"),
        pytest.param([make_record(status="oom")], id="only OOM"),
        pytest.param([make_record()], id="one point"),
        pytest.param([make_record(loss=1.0)], id="two epochs do not answer Q4"),
    ],
)
def test_what_is_no_curve_has_no_plot(found: list[Record]) -> None:
    assert plots_of(*found) == {}


def test_of_many_series_some_are_drawn_and_the_plot_says_how_many() -> None:
    found = [
        make_record(make_spec(batch_size_per_gpu=size, learning_rate=rate))
        for rate in range(1, 13)
        for size in (32, 64)
    ]
    plot = plots_of(*found)["q1"]
    names = labels(line_panel(plot))
    assert (len(names), names[-1], plot.note) == (
        MAX_SERIES,
        "learning rate 12",
        f"8 of 12 series are shown. {NO_BARS}",
    )


def svg_file(plot: Plot) -> str:
    return render_files(plot, ["svg"])["svg"].decode()


XLINK = 'xmlns:xlink="http://www.w3.org/1999/xlink" '  # which HTML knows by itself


@pytest.mark.seconds
def test_a_picture_is_self_contained_and_described() -> None:
    wanted = [*plots_of_records(*every_question()), *plots_of_records(*INT8_RECORDS)]
    assert {"q1", "q2", "q3", "q3-bandwidth", "q4", "int8", "int8-weights"} <= {plot.name for plot in wanted}
    for rendered in map(render_plot, wanted):
        file = svg_file(rendered.plot)
        for svg in (file, *rendered.pictures):
            ElementTree.fromstring(svg.replace("<svg ", "<svg " + XLINK, 1) if svg is not file else svg)
            assert not re.search(r"<script|(?:src|href)=\"(?!#)|url\((?!#)", svg)
        assert all(re.search(r"\d", panel.describe()) for panel in rendered.plot.panels)
        assert_says(file, *(escape(entry.label) for entry in rendered.plot.key()))


def test_the_numbers_of_an_axis_on_the_page_are_those_of_the_file() -> None:
    """0.25 was 0.2 there, and 0.75 was 0.8: they were rounded with the coordinates. Of many values few have a tick."""
    points = tuple(Point(x, 0.1 if x == 1 else 0.9) for x in range(1, 31))
    panel = LinePanel("x", "x", (Series("", points),), x_scale="linear", y_covers=(0, 1))
    rendered = render_plot(Plot("x", "", "x", (panel,)))
    ticks = re.findall(r">([\d.]+)</text>", rendered.pictures[0])
    assert {"0.25", "0.5", "0.75", "10", "20", "30"} <= {*ticks}
    assert {*ticks} <= {*re.findall(r">([\d.]+)</text>", svg_file(rendered.plot))}


def test_a_file_has_colours_and_a_picture_has_roles() -> None:
    rendered = render_plot(plots_of(*batch_records())["q1"])
    colours = set(re.findall(r"#[0-9a-f]{6}\b", svg_file(rendered.plot)))
    assert {LIGHT["--s0"], LIGHT["--fg"]} <= colours <= set(LIGHT.values())
    picture = rendered.pictures[0]
    assert {"--s0", "--fg"} <= set(re.findall(r"var\(([-\w]+)\)", picture)) <= set(LIGHT)
    assert not re.findall(r"#[0-9a-f]{6}\b|style=", picture)  # the content policy allows no style of an element
    assert len({*LIGHT.values()}) == len(LIGHT)  # else the style sheet could not tell two roles apart


def test_a_plot_is_a_file_in_each_format_and_the_same_each_time() -> None:
    plot = plots_of(*batch_records())["q1"]
    once, again = (render_files(plot, [*METADATA]) for _ in range(2))
    assert once == again
    assert {name: content[:4] for name, content in once.items()} == {"svg": b"<?xm", "pdf": b"%PDF", "png": b"\x89PNG"}


def themes() -> list[dict[str, str]]:
    """The variables of the light, the dark and the printed page."""
    style = (ROOT / "templates" / "report.css").read_text()
    blocks = [block for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL) if "--bg" in block]
    return [dict(re.findall(r"(--\w+): (#[0-9a-f]{6})", block)) for block in blocks]


def test_the_style_sheet_has_every_colour_in_every_theme() -> None:
    light, dark, printed = themes()
    assert (LIGHT.items() <= light.items(), LIGHT.keys() <= dark.keys()) == (True, True)
    assert light.keys() == dark.keys() == printed.keys()


def dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def linear(colour: str) -> tuple[float, ...]:
    values = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    return tuple(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values)


def contrast(*colours: str) -> float:
    """The contrast ratio of two colours, of WCAG 2.2."""
    dark, light = sorted(dot((0.2126, 0.7152, 0.0722), linear(colour)) for colour in colours)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", themes(), ids=["light", "dark", "print"])
def test_colours_stand_out_from_the_ground(theme: dict[str, str]) -> None:
    pairs = [*itertools.product(("--fg", "--muted", "--link"), ("--bg", "--panel")), ("--muted", "--shade")]
    assert min(contrast(theme[text], theme[ground]) for text, ground in pairs) >= MIN_TEXT_CONTRAST
    assert min(contrast(theme[f"--s{index}"], theme["--bg"]) for index in range(MAX_SERIES)) >= MIN_CONTRAST


# linear RGB as a dichromat sees it: Machado, Oliveira, Fernandes 2009, severity 1
PROTANOPIA = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))
DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))


def oklab(rgb: tuple[float, ...]) -> tuple[float, ...]:
    """Linear RGB in the Oklab space, where distance is difference as seen (Ottosson 2020)."""
    red, green, blue = (max(value, 0) for value in rgb)
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    medium = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


NORMAL = ((1, 0, 0), (0, 1, 0), (0, 0, 1))


@pytest.mark.parametrize("theme", themes()[:2], ids=["light", "dark"])
@pytest.mark.parametrize("sight", [NORMAL, PROTANOPIA, DEUTERANOPIA], ids=["normal", "protanopia", "deuteranopia"])
def test_series_differ_for_the_colour_blind_and_by_marker_too(
    theme: dict[str, str], sight: tuple[tuple[float, ...], ...]
) -> None:
    colours = [linear(theme[f"--s{index}"]) for index in range(MAX_SERIES)]
    seen = [oklab(tuple(dot(row, rgb) for row in sight)) for rgb in colours]
    assert min(math.dist(one, other) for one, other in itertools.combinations(seen, 2)) > 0.1  # 0.02 is noticeable
    assert len(set(MARKERS)) == len(set(MARKS)) == MAX_SERIES
