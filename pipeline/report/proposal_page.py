"""The page of a compute proposal, in Markdown and in HTML."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.figures.compute_rate import MFU_PEAK, NO_PEAK
from pipeline.plan.point_label import Terms, in_terms
from pipeline.records.outcomes import CollectedOutcomes
from pipeline.report.display import DisplayOptions, DisplayTable, build_table
from pipeline.report.formatter import name_texts
from pipeline.report.html import render_template
from pipeline.report.markdown import escape_markdown, name_source, render_table, wrap
from pipeline.report.plots import PlotSource
from pipeline.report.proposal import PROPOSAL, Proposal
from pipeline.report.provenance import describe_provenance
from pipeline.report.q2 import speedup_plots

if TYPE_CHECKING:
    from pipeline.report.draw import RenderedPlot

HIDDEN_NOTES = (MFU_PEAK, NO_PEAK)
MAX_WIDTH = 140  # characters of a row in Markdown: every column with its interval fits


def render_markdown(name: str, proposal: Proposal, collected: CollectedOutcomes) -> str:
    """Return the proposal in Markdown: the answers, the curves as tables, and the assumptions."""
    terms = terms_of(proposal, collected)
    said = [wrap(escape_markdown(in_terms(text, terms)), "- ") for text in proposal.answers]
    assumed = [wrap(escape_markdown(in_terms(text, terms)), "- ") for text in proposal.assumptions]
    parts = [f"# Compute proposal: {escape_markdown(name_source(name, collected))}", "\n".join(said)]
    parts += map(render_table, tables_of(proposal, terms))
    parts += ["## Assumptions", "\n".join(assumed), wrap(escape_markdown(describe_provenance(collected.records)))]
    return "\n\n".join(parts) + "\n"


def render_html(name: str, proposal: Proposal, collected: CollectedOutcomes) -> str:
    """Return the proposal as a page, which prints on two pages."""
    terms = terms_of(proposal, collected)
    said = {
        "title": f"Compute proposal: {name_source(name, collected)}",
        "answers": [in_terms(text, terms) for text in proposal.answers],
        "assumptions": [in_terms(text, terms) for text in proposal.assumptions],
        "provenance": describe_provenance(collected.records),
    }
    return render_template("proposal.html.j2", said, figures=draw(proposal, terms), tables=tables_of(proposal, terms))


def terms_of(proposal: Proposal, collected: CollectedOutcomes) -> Terms:
    return collected.terms._replace(unit=proposal.row["unit"] or collected.terms.unit)


def tables_of(proposal: Proposal, terms: Terms) -> list[DisplayTable]:
    """Return the tables that have rows: weak and strong scaling, and the models."""
    pairs = zip(PROPOSAL.views, (proposal.weak, proposal.strong, proposal.beyond), strict=True)
    views = [(view._replace(hidden_notes=HIDDEN_NOTES), rows) for view, rows in pairs if rows]
    tables = [build_table(PROPOSAL, view, rows, DisplayOptions(MAX_WIDTH)) for view, rows in views]
    return [name_texts(table._replace(source=""), terms) for table in tables]


def draw(proposal: Proposal, terms: Terms) -> "Sequence[RenderedPlot]":
    """Return the curves of weak and strong scaling, of every batch size."""
    from pipeline.report.draw import render_plot

    plots = speedup_plots(PlotSource({"Q2": proposal.plotted}, (), terms))
    return [render_plot(name_texts(plot, terms)) for plot in plots]
