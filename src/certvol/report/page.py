"""Write reports: a page for a run, and a page that compares runs."""

from collections.abc import Sequence
from pathlib import Path

from certvol.data.folders import printable
from certvol.errors import CertvolError, Interrupted, UserError
from certvol.progress import Reporter
from certvol.report.comparison import comparison_page
from certvol.report.records import Record, read_record
from certvol.report.run_page import run_page
from certvol.runs.outputs import check_output, write_output


def write_report(
    run: str | Path | Record,
    reporter: Reporter,
    target: str | Path | None = None,
    out: str | Path | None = None,
) -> Path:
    """Write RUN/report.html, or `out`. `target` is where the target folder is, if it was moved."""
    if target is not None and not Path(target).is_dir():
        raise UserError(
            f"--target {printable(str(target))} is not a folder; "
            "give the one with the target images"
        )
    record = run if isinstance(run, Record) else read_record(run)
    page = run_page(record, reporter, None if target is None else Path(target))
    return _write(page, record.path / "report.html" if out is None else Path(out))


def write_comparison(runs: Sequence[str | Path | Record], out: str | Path) -> Path:
    records = [run if isinstance(run, Record) else read_record(run) for run in runs]
    return _write(comparison_page(records), Path(out))


def _write(page: str, place: Path) -> Path:
    check_output(place)
    write_output(place, page)
    return place


def report_on_finished(run: Path, reporter: Reporter) -> Path | None:
    """Write the report at the end of a run, unless one is newer than the model.

    The run is complete, so an error here is only a warning.
    """
    place, model = run / "report.html", run / "model.safetensors"
    again = f"make it with `certvol report {printable(str(run))}`"
    try:
        if not place.exists() or place.stat().st_mtime_ns < model.stat().st_mtime_ns:
            write_report(run, reporter)
        return place
    except Interrupted as stopped:
        message = f"the run is complete, only its report was stopped; {again}"
        raise Interrupted(message, stopped.exit_code) from None
    except Exception as error:
        known = isinstance(error, CertvolError | OSError)
        reason = printable(str(error) if known else f"{type(error).__name__}: {error}")
        reporter.warn(f"the run is complete, but its report could not be made ({reason}); {again}")
        return None
