"""Writes report.html of each experiment, and the index. The packages of pages may be missing: tables need none."""

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.system.errors import import_error_as_command_error, log_line
from pipeline.tables.collect_experiment import CollectedExperiment

if TYPE_CHECKING:
    from pipeline.pages.html_page import IndexEntry


class Pages:
    """Writes report.html of each experiment, and the index at the end. Says once what package is missing."""

    def __init__(self, root: Path, has_index: bool) -> None:
        self.root, self.has_index = root, has_index
        self.entries: list[IndexEntry] = []
        self.problems: set[str] = set()

    def write(self, name: str, found: CollectedExperiment, logs: dict[str, Path]) -> None:
        """Write the page of one experiment; `logs` are by run id. Raises OSError."""
        try:
            from pipeline.pages.html_page import PageSource, write_report
        except ImportError as error:
            self.report_missing_package("no report.html", error)
            return
        folder, collected = found.experiment.folder, found.collected
        source = PageSource(name, folder, self.root, self.has_index, found.tables, collected, logs)
        entry, failed_import = write_report(source)
        self.entries.append(entry)
        if failed_import:
            self.report_missing_package("no plots in report.html", failed_import)

    def report_missing_package(self, what: str, error: ImportError) -> None:
        """Log what is missing and what to install, once for all experiments: the tables need neither."""
        refusal = import_error_as_command_error(error)
        if refusal is None:
            raise error
        sentence = f"{what}: it {refusal}"
        if sentence not in self.problems:
            log_line(sentence)
        self.problems.add(sentence)

    @property
    def front(self) -> Path | None:
        """The page to open first: the index, or the page of the only experiment; None if no page was written."""
        if not self.entries:
            return None
        return self.root / ("index.html" if self.has_index else "report.html")

    def write_index(self) -> None:
        """Write the index if several experiments were found. Raises OSError."""
        if self.has_index and self.entries:
            from pipeline.pages.html_page import write_index

            write_index(self.root, self.entries)
