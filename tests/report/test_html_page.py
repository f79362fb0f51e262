"""report.html and the index as text: what stands on them and where they link to; the first screen."""

import base64
import hashlib
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import Command
from factories import (
    NOISY,
    assert_says,
    known,
    make_experiment,
    make_measurement,
    make_record,
    make_script_spec,
    make_spec,
    on_gpus,
    resolved,
    windowed,
    with_measurement,
    write_file,
)
from rendered import (
    EVIL,
    assert_said_once,
    batch_records,
    build,
    collected_in,
    every_question,
    hostile_records,
    published_tables,
    write_index,
    write_page,
)

from pipeline.figures.epoch_figures import THROTTLED
from pipeline.figures.intervals import DRIFTED
from pipeline.figures.notes import make_note
from pipeline.figures.pooling import SHARED_NODE
from pipeline.figures.scaling import NO_BASELINE
from pipeline.plan.point_label import OF_GPUS
from pipeline.records.folder import Submission
from pipeline.records.record import Environment, Gpu, Record
from pipeline.report import html
from pipeline.report.claims import Tile
from pipeline.report.collected import csv_text
from pipeline.report.cost import ENDING_WORDS
from pipeline.report.html import Pages, describe_cost, heat_map_of, link_of, tiles_of, verdict_of
from pipeline.report.provenance import conditions_of, describe_setting
from pipeline.report.questions import Answer, build_tables
from pipeline.report.table import Row, Tables

VOID = {"meta", "link", "br", "wbr", "img", "source"}


class Page(HTMLParser):
    """A page: its elements, links, ids and text. Raises AssertionError if an element is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}

    def all(self, attribute: str) -> list[str]:
        return [value for _, attributes in self.elements if (value := attributes.get(attribute))]


LOGGED = make_spec(batch_size_per_gpu=2048).run_id()


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of an experiment that answers every question, with a log of one run."""
    folder = tmp_path_factory.mktemp("page")
    experiment = make_experiment(folder / "x", *every_question())
    log = write_file(experiment.logs / "a b#" / "1_0_log.err", "")
    pages = Pages(folder, True)
    pages.write("x", collected_in(experiment.folder, *every_question()), {LOGGED: log})
    pages.write_index()
    assert Page((folder / "index.html").read_text()).all("href") == ["x/report.html"]
    return (experiment.folder / "report.html").read_text()


def test_every_link_leads_to_a_place_on_the_page_or_holds_a_file(tmp_path: Path, full_page: str) -> None:
    found = collected_in(tmp_path, *every_question())
    page = Page(full_page)
    links = {attributes["href"]: attributes.get("download") for tag, attributes in page.elements if tag == "a"}
    held = {name: base64.b64decode(address.split(",")[1]) for address, name in links.items() if name and address}
    assert {address for address, name in links.items() if not name} <= {f"#{id}" for id in page.all("id")}
    assert held["q2.csv"].decode() == csv_text(found.content["Q2"])
    assert {"q1", "q2"} <= {*page.all("data-save")}
    assert f"records/{LOGGED}.0.jsonlogs/a b#/1_0_log.err" in page.text  # two cells


def test_a_large_table_is_named_and_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MAX_LINK_BYTES", 100)
    page = Page(write_page(tmp_path / "x", *batch_records()).read_text())
    assert "q1.csv (in the experiment's folder)" in page.text
    assert "q1.csv" not in page.all("download")


@pytest.fixture(scope="module")
def batch_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of batch_records() and of a point that is missing, above the plots of an earlier run."""
    plots = tmp_path_factory.mktemp("page") / "x" / "plots"
    plots.mkdir(parents=True)
    for name in ("mine.svg", "q4-8192.svg", "int8-weights.svg"):
        (plots / name).write_text("earlier")
    page = write_page(plots.parent, *batch_records(), missing=[make_spec(batch_size_per_gpu=8192)]).read_text()
    assert sorted(path.name for path in plots.iterdir()) == ["mine.svg", "q1.svg"], "plots of an earlier run stay"
    return page


def test_a_cell_links_to_its_own_point(batch_page: str) -> None:
    for size, time in ((32, "12.000"), (128, "5.000"), (512, "4.000"), (2048, "OOM")):
        run_id = make_spec(batch_size_per_gpu=size).run_id()
        assert re.search(rf'<a href="#{run_id}">{time}</a>', batch_page)


def test_a_row_with_remedies_links_to_its_point_where_the_learning_rate_varies(tmp_path: Path) -> None:
    """64 of 32 images of reference: the peak is twice the rate, which is the rate of another point."""
    common = {"batch_size_per_gpu": 64, "reference_batch_size": 32, "epochs": 2, "evaluate": True}
    scaled = make_spec(learning_rate=0.1, remedies=("linear_scaling",), **common)
    found = [make_record(spec, loss=1.0) for spec in (scaled, make_spec(learning_rate=0.2, **common))]
    source = collected_in(tmp_path / "x", *found)
    linked = {(tuple(row["remedies"]), row["learning_rate"]): link_of(row) for row in source.tables["Q4"]}
    assert linked == {(("linear_scaling",), 0.2): f"#{found[0].run_id}", ((), 0.2): f"#{found[1].run_id}"}


def test_the_cost_is_in_words() -> None:
    rows = [
        Row({}, {"ending": "ok_other", "gpu_hours": None, "process_hours": 1.64}),
        Row({}, {"ending": "oom", "gpu_hours": 0.0, "process_hours": None}),
    ]
    assert describe_cost(rows) == [f"1.64 process hours ({ENDING_WORDS['ok_other']})"]


def test_the_index_has_what_is_answered(tmp_path: Path) -> None:
    said = Page(write_index(tmp_path, x=make_record())).text
    assert_said_once(said, "Only batch tried, one GPU 128 images 50,000 images/s", never=("Not answered", "Next:"))


def test_the_index_has_the_latest_first_with_its_conditions(tmp_path: Path) -> None:
    times = {"old": "2026-11-21T10:00:00Z", "new": "2026-11-22T10:00:00Z", "bare": None}
    spec = make_spec(precision="bf16", input="gpu", execution="graph")
    text = write_index(
        tmp_path, **{name: msgspec.structs.replace(make_record(spec), started_at=time) for name, time in times.items()}
    )
    assert re.findall(r"(\w+)</a>", text) == ["new", "old", "bare"]
    assert "bf16; graph; images on the device; resnet18 on cifar10" in text


def test_an_experiment_that_was_just_submitted_is_the_first_of_the_index(pipeline: Command, tmp_path: Path) -> None:
    """It has no record yet, and stood last."""
    record = msgspec.structs.replace(make_record(), started_at="2026-11-21T10:00:00Z")
    make_experiment(tmp_path / "measured", record)
    submission = Submission("0" * 32, "slurm", "2026-11-22T10:00:00Z")
    make_experiment(tmp_path / "submitted", missing=[make_spec()], submissions=[submission])
    make_experiment(tmp_path / "untold", missing=[make_spec()])
    pipeline("collect", tmp_path)
    index = (tmp_path / "index.html").read_text()
    assert re.findall(r"(\w+)</a>", index) == ["submitted", "measured", "untold"]


def test_the_conditions_say_what_computed() -> None:
    """The axis of a script is eager: its grid asks for nothing."""
    compiled = with_measurement(make_record(), execution_used="compile", precision_used="bf16")
    said = conditions_of(resolved(compiled).outcomes)
    assert (said["execution"], said["precision"]) == ("compile", "bf16")


def test_the_conditions_say_which_steps_have_compiled_blocks() -> None:
    both = [make_spec(model="gpt", dataset=None, input="synthetic", compile=parts) for parts in ("none", "blocks")]
    said = "eager or eager with compiled blocks"
    assert conditions_of(resolved(missing=both).outcomes) == {
        "precision": "tf32",
        "execution": said,
        "input": "synthetic",
    }


@pytest.mark.seconds
def test_a_page_is_the_same_where_the_locale_is_not_utf_8(pipeline: Command, tmp_path: Path) -> None:
    folder = make_experiment(tmp_path / "x", make_record()).folder
    pages = []
    for locale in ({}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        assert pipeline("collect", folder, env=os.environ | locale).returncode == 0
        pages.append((folder / html.REPORT_NAME).read_text("utf-8"))
        (folder / html.REPORT_NAME).unlink()
    assert pages[0] == pages[1]


def test_the_index_says_what_was_ingested(tmp_path: Path) -> None:
    stated = msgspec.structs.replace(make_record(), measured=False)
    assert re.findall(r"<a href=.*</a>[^<]*", write_index(tmp_path, a=make_record(), b=stated)) == [
        '<a href="a/report.html">a</a>',
        '<a href="b/report.html">b</a> (ingested)',
    ]


def test_what_to_try_next_has_options_only_where_a_command_submitted_it(tmp_path: Path) -> None:
    for is_measured in (True, False):
        found = [make_record(make_spec(strategy="dp", num_gpus=num_gpus), (9, 8)) for num_gpus in (1, 2)]
        stated = [msgspec.structs.replace(record, measured=is_measured) for record in found]
        text = Page(write_page(tmp_path / str(is_measured), *stated).read_text()).text
        assert "limited by DataParallel" in text
        assert ("--set strategy=ddp" in text, "Add the options" in text) == (is_measured, is_measured)


def test_the_index_has_a_column_for_each_question_that_an_experiment_answers(tmp_path: Path) -> None:
    text = write_index(tmp_path, a=make_record(), b=make_record(status="failed", reason="no"))
    assert re.findall(r'<th scope="col">(.*?)</th>', text) == ["Experiment", "Recommendation", "Batch size"]
    assert text.count("<td></td>") == 2  # of the one that failed


def test_the_content_policy_allows_the_style_sheet_and_the_script_and_nothing_else(full_page: str) -> None:
    page = Page(full_page)
    own = re.findall(r"<(style|script)>(.*?)</\1>", full_page, re.DOTALL)
    digests = {tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for tag, text in own}
    assert [value for value in page.all("content") if "default-src" in value] == [
        f"default-src 'none'; img-src data:; style-src 'sha256-{digests['style']}'; "
        f"script-src 'sha256-{digests['script']}'; base-uri 'none'; form-action 'none'"
    ]
    assert (len(own), page.all("style"), {"link", "iframe", "img"} & page.tags) == (2, [], set())
    assert (page.all("src"), page.all("onclick")) == ([], [])
    assert {*re.findall(r"https?://[^\" ]*", full_page)} <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_a_hostile_text_stays_text(tmp_path: Path) -> None:
    """The reasons of all points, the name and the environment hold a script, an image and a change of direction."""
    plain = Page(write_page(tmp_path / "x", *hostile_records()).read_text())
    page = Page(write_page(tmp_path / "y", *hostile_records(), name=EVIL).read_text())
    assert (page.tags, "\u202e" in page.text) == (plain.tags, False)
    assert page.text.count(EVIL.replace("\u202e", " ")) >= 8


@pytest.mark.parametrize(
    ("found", "words"),
    [
        pytest.param([], "no configurations", id="no records"),
        pytest.param([make_record(status="oom", reason="full")], "1 configuration: 1 out of memory", id="only OOM"),
        pytest.param([make_record()], "1 configuration: 1 ok", id="one point"),
    ],
)
def test_little_to_show_is_still_a_page(tmp_path: Path, found: list[Record], words: str) -> None:
    page = Page(write_page(tmp_path / "x", *found).read_text())
    assert (words in page.text, "svg" in page.tags) == (True, False)


def test_what_an_experiment_does_not_ask_is_one_line_and_no_command(tmp_path: Path) -> None:
    assert_said_once(
        Page(write_page(tmp_path / "x", make_record()).read_text()).text,
        "Batch size: 1 row",
        "Not part of this experiment: scaling over GPUs; communication; the accuracy of large batches.",
        never=("--grid scaling", "--grid communication", "--grid q4-study", "Next:"),
    )


def test_the_line_on_top_says_what_was_measured_where_when_and_how_often(tmp_path: Path) -> None:
    place = Environment(gpus=(Gpu(name="NVIDIA H200"),), nodes=("n17",), git_commit="58b8ca2" + 33 * "0")
    specs = [*(make_spec(repeat=number) for number in range(6)), make_spec(strategy="ddp", num_gpus=4)]
    found = [
        msgspec.structs.replace(make_record(spec, environment=place), started_at="2026-11-21T23:59:00Z")
        for spec in specs
    ]
    expected = ["ResNet-18 on 1 to 4 NVIDIA H200", "node n17", "21 November 2026", "commit 58b8ca2"]
    assert describe_setting(found) == [*expected, "1 to 6 runs each"]
    assert describe_setting(found[:6])[-1] == "6 runs each"
    first, *others = describe_setting(found)
    assert_says(write_page(tmp_path / "x", *found).read_text(), f"<h1>{first}</h1>", " · ".join(others))
    axes: dict[str, Any] = {"device": "cpu", "model": "lenet", "dataset": "synthetic", "input": "synthetic"}
    assert describe_setting([make_record(make_spec(**axes))]) == ["LeNet on 1 CPU process", "one run each"]
    on_two = make_record(make_spec(strategy="ddp", num_gpus=2, **axes), environment=Environment(nodes=("node7",)))
    assert describe_setting([on_two]) == ["LeNet on 2 CPU processes", "node7", "one run each"]
    assert describe_setting([make_record(status="failed")]) == []
    of_user = msgspec.structs.replace(place, model_digest="d" * 64, model_commit="abcdef0" + 33 * "0")
    said = describe_setting([make_record(make_script_spec(), environment=of_user)])
    assert said[2:4] == ["commit abcdef0", "ddpscale commit 58b8ca2"]


def test_a_page_has_a_title_and_an_author_of_the_users_own_and_is_written_anew_with_them(
    pipeline: Command, tmp_path: Path
) -> None:
    make_experiment(tmp_path / "x", make_record())
    assert pipeline("collect", tmp_path / "x").returncode == 0
    named = pipeline("collect", tmp_path / "x", "--title", "Ours <b>", "--author", "Ada Lovelace")
    text = (tmp_path / "x" / "report.html").read_text()
    assert (named.returncode, "<h1>Ours &lt;b&gt;</h1>" in text) == (0, True)
    assert '<p class="muted">Ada Lovelace · x · ResNet-18 on 1 ' in text
    make_experiment(tmp_path / "y", make_record())
    several = pipeline("collect", tmp_path, "--title", "Ours")
    assert (several.returncode, "name the folder of one" in several.stderr) == (2, True)


def test_a_folder_of_plots_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "plots").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        write_page(tmp_path / "x", *batch_records())
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_note_is_a_badge_with_a_word_and_its_text_on_hover_and_below(tmp_path: Path) -> None:
    """Five notes of one row: three words, and the others in one."""
    notes = [make_note(DRIFTED, what="epoch_time_s", drift=0.1), make_note(THROTTLED, reasons=["sw_power_cap"])]
    notes += [make_note(SHARED_NODE, others=2), notes[1]._replace(is_of_baseline=True), make_note(NO_BASELINE)]
    found = collected_in(tmp_path / "x", *batch_records())
    first, *others = found.tables["Q1"]
    found.tables["Q1"][:] = [msgspec.structs.replace(first, notes=tuple(notes)), *others]
    Pages(tmp_path, False).write("x", found, {})
    text = (tmp_path / "x" / "report.html").read_text()
    badges = re.findall(r'<abbr class="badge" title="([^"]*)">([^<]*)</abbr>', text)
    (_, throttled, _, more, _), words = zip(*badges, strict=True)
    assert words == ("drifted", "throttled", "shared node", "2 more", "out of GPU memory")
    assert throttled == "throttled: GPU at its power limit"
    assert more.startswith("baseline: throttled: GPU at its power limit; no baseline: the experiment")
    assert "<li><b>baseline throttled</b>: baseline: throttled: GPU at its power limit</li>" in text


def tables_of(*found: Record) -> Tables:
    return build_tables(resolved(*found).outcomes)


@pytest.mark.parametrize(
    ("epoch_s", "computing", "text", "title"),
    [
        (1.0, 1.0, "100", ""),
        (0.9, 1.0, "", "111% cannot be: noise, or a slow baseline"),
        (1.0, 0.5, "100 ○", "loader-bound: the GPU that waits longest waits for data in 50 % of the epoch"),
    ],
)
def test_an_efficiency_that_cannot_be_is_blank_and_one_that_no_answer_uses_marked(
    epoch_s: float, computing: float, text: str, title: str
) -> None:
    points = [({}, 2.0), ({"strategy": "ddp", "num_gpus": 2}, epoch_s)]
    specs = [(make_spec(batch_size_per_gpu=size, **axes), time_s) for size in (32, 64) for axes, time_s in points]
    times = [(spec, make_measurement(spec, (9, time_s), compute_share=computing)) for spec, time_s in specs]
    found = known(heat_map_of(tables_of(*(make_record(spec, measurement=one) for spec, one in times)), OF_GPUS))
    ((_, cells),) = found.rows
    assert [(cell.text, cell.title[: len(title)]) for cell in cells] == [(text, title)] * 2
    assert found.note.endswith("○ Not used in the answers above: loader-bound.") is ("○" in text)
    assert found.is_shaded is (text == "100"), "else no cell has a shade, and no key is needed"


def test_the_efficiency_is_that_of_the_most_gpus_whose_speed_up_an_answer_uses() -> None:
    specs = [on_gpus(num_gpus, size) for size in (32, 64) for num_gpus in (1, 2, 4)]
    times = [(spec, 0.5 if spec.num_gpus == 4 else 1.0) for spec in specs]
    found = [
        make_record(spec, measurement=make_measurement(spec, (9, 1.1 / spec.num_gpus), compute_share=share))
        for spec, share in times
    ]
    assert known(heat_map_of(tables_of(*found), OF_GPUS)).heading == "Efficiency on 2 GPUs [%]"


def test_the_shades_of_efficiency_have_a_key(tmp_path: Path) -> None:
    axes = [{}, {"strategy": "ddp", "num_gpus": 2}]
    found = [make_record(make_spec(batch_size_per_gpu=size, **one)) for size in (32, 64) for one in axes]
    page = write_page(tmp_path / "x", *found).read_text()
    key = re.findall(r'<span class="shade (\w+)">([^<]*)', page)
    assert key == [(shade, words) for _, shade, words in html.EFFICIENCY_SHADES]
    shades = [f'class="{shade}"' for _, shade, _ in html.EFFICIENCY_SHADES]
    assert [page.count(shade) for shade in shades] == [0, 0, 2, 0], "50 % twice: both have the same epoch time"


def test_what_a_script_sends_without_need_is_not_said_to_slow_it() -> None:
    """Its exposed communication is within the noise."""
    found = verdict_of(published_tables("h200x2/train-gpt-simple"), OF_GPUS)
    assert found is not None
    assert found[1].startswith("1 of 1 configurations: 572.2 MB of gradients an update travel after the backward pass")
    slowed = verdict_of(published_tables("v100-dp"), OF_GPUS)
    assert slowed is not None
    assert slowed[1] == "It slows 10 of 15 configurations. Try strategy=ddp."


def test_configurations_of_data_parallel_that_wait_for_data_are_limited_by_it_alone() -> None:
    spec = make_spec(strategy="dp", num_gpus=2)
    found = build(make_record(spec, measurement=make_measurement(spec, (9, 4), compute_share=0.5)))
    verdict = verdict_of(found, OF_GPUS)
    assert verdict is not None
    assert verdict.headline.startswith("DataParallel is the bottleneck")


def test_an_efficiency_above_1_has_no_shade() -> None:
    times_s = [(2 / num / speed, num) for num, speed in ((1, 1), (2, 1.03))]
    records = [windowed([s * factor for factor in NOISY], size, num) for size in (64, 128) for s, num in times_s]
    ((_, cells),) = known(heat_map_of(build(*records), OF_GPUS)).rows
    assert [(cell.text, cell.shade) for cell in cells] == [("103", "")] * 2


def test_a_tile_keeps_the_badges_that_the_setting_does_not_say() -> None:
    tiles = [Tile("A", badges=("one run", "clocks lowered")), Tile("B", badges=("one run", "clocks lowered"))]
    found = tiles_of([Answer("Q1", tiles, OF_GPUS)], "LeNet, one run each")
    assert [tile.badges for tile in found] == [("clocks lowered",)] * 2


def test_a_series_without_a_figure_has_no_row() -> None:
    """It had an empty row of DDP with evaluation, which has no configuration on one GPU beside it."""
    on_two = {"strategy": "ddp", "num_gpus": 2}
    records = [make_record(make_spec(batch_size_per_gpu=size, **axes)) for size in (32, 64) for axes in ({}, on_two)]
    found = known(heat_map_of(tables_of(*records, make_record(make_spec(**on_two, evaluate=True))), OF_GPUS))
    assert len(found.rows) == 1
