"""The tables of a benchmark: ours with mean and deviation over seeds, the published rows below; as Markdown, LaTeX and CSV."""

import csv
import io
import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from certvol.benchmark import claims
from certvol.benchmark.results import DONE, Result
from certvol.benchmark.statistics import SIGNIFICANT, least_p, rank_correlation, sign_flip_p, tasks_p
from certvol.benchmark.suites import Suite
from certvol.selection import SELECTORS

AVERAGE = "average"
OVER_TASKS = "p over tasks"
MOST_NAMED = 6  # runs in a note
OPPOSITE = {"less": "more", "more": "less", "sooner": "later"}
LOSSES = {claims.BASIC: "Basic", claims.WITHOUT_SAMPLES: "No samples CE", claims.FULL: "Full CVP"}  # the paper's names
WHY_NO_SCORE = {
    "sigma": "these methods have no sigma",
    "source_accuracy": "no source images are held out (`data.holdout` is 0), or the method is fitted to the target at once",
}
WATCHED_NOTE = (
    "The label-free choice and the oracle come from predictions that each run keeps per cycle on some fixed target images "
    "(`guard.images`); their difference to the delivered model's is added to its accuracy on the whole target."
)


@dataclass(frozen=True)
class Cell:
    mean: float | None = None
    """Fraction."""
    deviation: float | None = None
    count: int = 0
    text: str = ""
    """Instead of figures."""
    rank: int = 0
    """1 the best of its column, 2 the second."""


@dataclass(frozen=True)
class Row:
    name: str
    cells: list[Cell]
    published: bool = False


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[Row]
    text_columns: int = 0
    """So many after the name hold text."""
    notes: list[str] = field(default_factory=list)


@cache
def published() -> dict[str, Any]:
    text = resources.files("certvol.benchmark").joinpath("published.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def mean_and_deviation(values: Sequence[float]) -> Cell:
    """The deviation is that of a sample (n - 1); none for one value."""
    if not values:
        return Cell()
    return Cell(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def all_tables(
    suite: Suite, results: Sequence[Result], tasks: list[str], selector: str, baseline: str | None
) -> list[Table]:
    """What `table.md` holds. `tasks`: in the order of columns."""
    done = [result for result in results if result.status == DONE]
    methods = list(dict.fromkeys(result.method for result in results))
    if suite.metric == "mean_class_accuracy":
        tables = [class_table(suite, done, methods, task, selector) for task in tasks]
    else:
        tables = [task_table(suite, done, methods, tasks, selector)]
    if sum(any(result.method == method for result in done) for method in LOSSES) > 1:
        tables.append(loss_table(suite, done, tasks))
    if baseline is not None and (gains := gain_table(done, methods, baseline)).rows:
        tables.append(gains)
    if findings := claims.find(done):
        tables.append(claim_table(findings))
    if any(result.cycles is not None for result in done):
        tables.append(validator_table(done))
    return tables


# --- tables ------------------------------------------------------------------------------------------------------------


def task_table(suite: Suite, done: Sequence[Result], methods: list[str], tasks: list[str], selector: str) -> Table:
    rows = []
    for method in methods:
        own = [result for result in done if result.method == method]
        cells = [mean_and_deviation([r.last for r in own if r.task == task and r.last is not None]) for task in tasks]
        averages = [_average(own, tasks, column) for column in ("last", "selected", "oracle")]
        rows.append(Row(method, [_text(_backbone_of(own)), _text("last"), *cells, *averages]))
    rows = _ranked(rows, skip=2)
    notes = [*_delivered_notes(done, methods, tasks), *_choice_notes(done, methods, selector)]
    rows += _published_tasks(suite, tasks, notes)
    columns = ["backbone", "chosen by", *tasks, AVERAGE, f"label-free choice ({selector})", "oracle (unattainable)"]
    title = f"{suite.name}: target accuracy, %, mean and standard deviation over seeds"
    return Table(title, columns, rows, 2, [_missing_note(done, methods, tasks), *notes])


def _delivered_notes(done: Sequence[Result], methods: list[str], tasks: list[str]) -> list[str]:
    """Of runs that delivered another model than the last cycle's, which is the one in the table."""
    notes = []
    for method in methods:
        others = [r for r in done if r.method == method and r.task in tasks and r.other_delivered is not None]
        if others:
            shown = [f"{r.task} seed {r.seed} {100 * (r.other_delivered or 0):.1f}" for r in others[:MOST_NAMED]]
            more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
            notes.append(
                f"{method}: the guard or `guard.select` delivered another model than the last cycle's, which is the one shown. "
                f"Delivered were: {', '.join(shown)}{more}."
            )
    return notes


def class_table(suite: Suite, done: Sequence[Result], methods: list[str], task: str, selector: str) -> Table:
    """A column per class, and their mean: of the delivered model, the only one whose classes a run tells."""
    names = list(suite.class_names)
    rows, others = [], []
    for method in methods:
        own = [result for result in done if result.method == method and result.task == task]
        cells = [mean_and_deviation([v for r in own if (v := r.per_class.get(name)) is not None]) for name in names]
        averages = [_average(own, [task], column) for column in ("delivered", "selected", "oracle")]
        not_last = [result.seed for result in own if result.other_delivered is not None]
        if not_last:
            seeds = ", ".join(map(str, not_last))
            last = cell_text(_average(own, [task], "last"))
            others.append(
                f"{method}: with seed {seeds} the guard or `guard.select` delivered another model than the last cycle's; the "
                f"last cycles' mean is {last}."
            )
        rows.append(Row(method, [_text(_backbone_of(own)), _text("run" if not_last else "last"), *cells, *averages]))
    rows = _ranked(rows, skip=2)
    notes = others + _choice_notes([result for result in done if result.task == task], methods, selector)
    facts = published().get(suite.name, {})
    if task == suite.splits.get(facts.get("split", ""), ""):
        blank = [Cell(), Cell()]
        for name, values in facts["rows"].items():
            figures = [Cell(None if value is None else value / 100) for value in values]
            words = _text(_published_backbone(facts, name)), _text(_selection(facts, name))
            rows.append(Row(name, [*words, *figures, *blank], True))
        notes.append(f"Published rows: {facts['source']}.")
    columns = ["backbone", "chosen by", *names, "mean", f"label-free choice ({selector})", "oracle (unattainable)"]
    title = f"{suite.name}, {task}: accuracy per class and their mean, %, mean and standard deviation over seeds"
    return Table(title, columns, rows, 2, [_missing_note(done, methods, [task]), *notes])


def loss_table(suite: Suite, done: Sequence[Result], tasks: list[str]) -> Table:
    """The paper's ablation of its losses, on the tasks that these methods have runs of."""
    shown = [task for task in tasks if any(r.task == task and r.method in LOSSES for r in done)]
    rows = []
    for method, name in LOSSES.items():
        own = [result for result in done if result.method == method]
        if own:
            cells = [mean_and_deviation([r.last for r in own if r.task == t and r.last is not None]) for t in shown]
            wavering = [r.facts["oscillation"] for r in own if "oscillation" in r.facts]
            figure = f"{statistics.fmean(wavering):.1f}" if wavering else ""
            words = _text(method), _text(_backbone_of(own))
            rows.append(Row(name, [*words, *cells, _average(own, shown, "last"), _text(figure)]))
    rows = _ranked(rows, skip=2)
    notes = [
        "Oscillation of the decision boundary: mean over runs, less is smoother. Compare it on the same images alone."
    ]
    facts = published()["ablation"]
    if suite.name == facts["suite"]:
        rows += [_published_losses(facts, name, shown) for name in facts["accuracy"]]
        notes.append(f"Published rows: {facts['source']}.")
    title = f"the losses: {suite.metric.replace('_', ' ')} of the target, %, and oscillation"
    return Table(title, ["method", "backbone", *shown, AVERAGE, "oscillation"], rows, 2, notes)


def _published_losses(facts: dict[str, Any], name: str, shown: list[str]) -> Row:
    """Means are as printed where the paper's tasks are shown, of those shown where they are fewer, else with the tasks named."""
    tasks = facts["tasks"]
    accuracy, wavering = facts["accuracy"][name], facts["oscillation"].get(name)
    cells = [Cell(accuracy[tasks.index(task)] / 100) if task in tasks else Cell() for task in shown]

    def mean(values: Sequence[float] | None) -> str:
        if values is None:
            return ""
        if set(shown) < set(tasks):
            return f"{statistics.fmean(values[tasks.index(task)] for task in shown):.1f}"
        return f"{values[-1]:.1f}" if set(shown) == set(tasks) else f"{values[-1]:.1f} (of {', '.join(tasks)})"

    return Row(name, [_text(""), _text(facts["backbone"]), *cells, _text(mean(accuracy)), _text(mean(wavering))], True)


def gain_table(done: Sequence[Result], methods: list[str], baseline: str) -> Table:
    base = {(r.task, r.seed): r.last for r in done if r.method == baseline and r.last is not None}
    rows = []
    for method in methods:
        own = {(r.task, r.seed): r.last for r in done if r.method == method and r.last is not None}
        by_pair = {pair: own[pair] - base[pair] for pair in own if pair in base}
        if method == baseline or not by_pair:
            continue
        differences = list(by_pair.values())
        words = (
            str(len(differences)),
            _chance(sign_flip_p(differences)),
            _chance(tasks_p(by_pair)),
            verdict(differences),
        )
        rows.append(Row(method, [mean_and_deviation(differences), *map(_text, words)]))
    columns = ["mean gain", "pairs", "p", OVER_TASKS, "which is"]
    notes = [
        "p: two-sided exact test by flipping the signs of the paired differences; not corrected for several comparisons.",
        "Seeds of one task are no independent tasks: a gain here is one on these tasks.",
    ]
    title = f"gain over {baseline} in points, over pairs of the same task and seed"
    return _told_over_tasks(Table(title, columns, rows, notes=notes))


def _told_over_tasks(table: Table) -> Table:
    """Without the column of the test over tasks where there are too few of them, else with a word on it."""
    place = table.columns.index(OVER_TASKS)
    if any(cell_text(row.cells[place]) for row in table.rows):
        word = f"`{OVER_TASKS}`: the same test with the mean of each task as one difference, so that seeds do not pass for tasks."
        return replace(table, notes=[*table.notes, word])
    rows = [replace(row, cells=row.cells[:place] + row.cells[place + 1 :]) for row in table.rows]
    return replace(table, columns=table.columns[:place] + table.columns[place + 1 :], rows=rows)


def verdict(differences: Sequence[float]) -> str:
    """In words, so that nobody takes noise for a gain."""
    p = sign_flip_p(differences)
    if least_p(len(differences)) >= SIGNIFICANT:
        return "undecided: too few pairs to tell a gain from noise"
    if p >= SIGNIFICANT:
        return "within the noise"
    return "a gain above the noise" if statistics.fmean(differences) > 0 else "a loss above the noise"


def claim_table(findings: Sequence[claims.Finding]) -> Table:
    rows = []
    for finding in findings:
        claim, mean = finding.claim, mean_and_deviation(finding.effects)
        spread = "" if mean.deviation is None else f" ± {mean.deviation:.{claim.digits}f}"
        figure = _effect(mean.mean or 0.0, spread, claim)
        p = "" if len(finding.effects) < 2 else _chance(finding.p)
        words = (figure, str(len(finding.effects)), p, _chance(finding.p_over_tasks), finding.verdict)
        rows.append(Row(f"({claim.letter}) {claim.words}", [_text(word) for word in words]))
    columns = ["mean and standard deviation", "tasks x seeds", "p", OVER_TASKS, "which is"]
    notes = [
        "p: as above, for the effect being none; `seen` and `not seen` are below 0.05 and speak of these tasks alone."
    ]
    return _told_over_tasks(Table("the paper's claims on these runs", columns, rows, notes=notes))


def _effect(mean: float, spread: str, claim: claims.Claim) -> str:
    """As `12.0 ± 3.0 % less`, of the opposite `more`; where the unit tells no direction, with a sign."""
    *unit, last = claim.unit.split(" ")
    if last not in OPPOSITE:
        return f"{mean:+.{claim.digits}f}{spread} {claim.unit}".strip()
    return f"{abs(mean):.{claim.digits}f}{spread} {' '.join([*unit, last if mean >= 0 else OPPOSITE[last]])}"


def validator_table(done: Sequence[Result]) -> Table:
    """How well each label-free score ranks cycles, against the true accuracy that only a benchmark knows."""
    adapted = [result for result in done if result.cycles is not None and result.last is not None]
    rows = []
    for name in SELECTORS:
        own = [
            (result, result.cycles) for result in adapted if result.cycles is not None and name in result.cycles.scores
        ]
        within = [rank_correlation(cycles.scores[name], cycles.accuracy) for _, cycles in own]
        across = []
        for task in dict.fromkeys(result.task for result, _ in own):
            of_task = [cycles for result, cycles in own if result.task == task]
            scores = [score for cycles in of_task for score in cycles.scores[name]]
            across.append(rank_correlation(scores, [value for cycles in of_task for value in cycles.accuracy]))
        gains = []
        for _, cycles in own:
            if (chosen := cycles.chosen_by(name)) is not None:
                gains.append(cycles.accuracy[chosen] - cycles.accuracy[-1])
        rows.append(
            Row(
                name,
                [
                    _correlation(within),
                    _text("") if name == "ensv" else _correlation(across),  # its candidates are those of one run
                    mean_and_deviation(gains),
                    _text(str(len(own))),
                ],
            )
        )
    best = mean_and_deviation([max(c.accuracy) - c.accuracy[-1] for r in adapted if (c := r.cycles) is not None])
    rows.append(Row("oracle (unattainable)", [_text(""), _text(""), best, _text(str(len(adapted)))]))
    return Table(
        "label-free validators: rank correlation with target accuracy, and what their choice gains over the last cycle",
        ["over the cycles of a run", "over all cycles of a task", "gain of the choice, points", "runs"],
        rows,
        notes=["Spearman's correlation, signed so that 1 is a perfect validator; means over runs and over tasks."],
    )


def _average(own: Sequence[Result], tasks: list[str], column: str) -> Cell:
    """Mean over tasks of their means; the deviation over seeds that have all tasks. Nothing where a task is missing."""
    values = {(r.task, r.seed): value for r in own if (value := getattr(r, column)) is not None and r.task in tasks}
    per_task = [[value for (t, _), value in values.items() if t == task] for task in tasks]
    if not tasks or not all(per_task):
        return Cell()
    seeds = sorted({seed for _, seed in values})
    whole = [s for s in seeds if all((task, s) in values for task in tasks)]
    spread = mean_and_deviation([statistics.fmean(values[task, s] for task in tasks) for s in whole]).deviation
    return Cell(statistics.fmean(statistics.fmean(found) for found in per_task), spread, len(values))


def _published_tasks(suite: Suite, tasks: list[str], notes: list[str]) -> list[Row]:
    facts = published().get(suite.name)
    if facts is None:
        return []
    rows = []
    for name, values in facts.get("rows", {}).items():
        by_task = dict(zip(facts["tasks"], values, strict=False))
        printed = facts.get("std", {}).get(name, [])
        deviations = dict(zip(facts["tasks"], printed, strict=False))
        cells = [
            Cell(None if by_task.get(t) is None else by_task[t] / 100, deviations[t] / 100 if t in deviations else None)
            for t in tasks
        ]
        known = [cell.mean for cell in cells if cell.mean is not None]
        mean, spread = statistics.fmean(known) if known and len(known) == len(tasks) else None, None
        if set(tasks) == set(facts["tasks"]) and len(values) > len(tasks):
            mean = values[-1] / 100  # as printed
            spread = printed[-1] / 100 if len(printed) > len(tasks) else None
        words = _text(_published_backbone(facts, name)), _text(_selection(facts, name))
        rows.append(Row(name, [*words, *cells, Cell(mean, spread), Cell(), Cell()], True))
    whole = set(tasks) == set(suite.tasks)
    for name, average in facts.get("average", {}).items():
        words = _text(_published_backbone(facts, name)), _text(average.get("selection", "unknown"))
        cell = Cell(average["value"] / 100) if whole else _text(f"{average['value']:.1f} (of all {len(suite.tasks)})")
        rows.append(Row(name, [*words, *(Cell() for _ in tasks), cell, Cell(), Cell()], True))
    notes.append(
        f"Published rows: {facts['source']}; on {facts['backbone']}, so compare them with ours on the same alone."
    )
    return rows


def _published_backbone(facts: dict[str, Any], name: str) -> str:
    return str(facts.get("backbones", {}).get(name, facts["backbone"]))


def _selection(facts: dict[str, Any], name: str) -> str:
    selection = facts.get("selection", {})
    return str(selection.get(name, selection.get("others", "unknown")))


def _backbone_of(own: Sequence[Result]) -> str:
    return ", ".join(sorted({result.backbone for result in own}))


def _choice_notes(done: Sequence[Result], methods: list[str], selector: str) -> list[str]:
    """On the columns of the label-free choice and the oracle."""
    if all(result.cycles is None for result in done):
        return []
    without = [method for method in methods if any(r.method == method and r.selected is None for r in done)]
    if not without:
        return [WATCHED_NOTE]
    why = WHY_NO_SCORE.get(selector, "their runs have no such score")
    return [WATCHED_NOTE, f"No label-free choice by {selector} for {', '.join(without)}: {why}."]


def _missing_note(done: Sequence[Result], methods: list[str], tasks: list[str]) -> str:
    counts = [sum(r.method == m and r.task == t for r in done) for m in methods for t in tasks]
    if not counts:
        return "No runs."
    if min(counts) == max(counts):
        return f"{min(counts)} {'seed' if min(counts) == 1 else 'seeds'} per cell."
    return f"{min(counts)} to {max(counts)} seeds per cell: cells are not alike in certainty."


def _text(words: str) -> Cell:
    return Cell(text=words)


def _chance(p: float | None) -> str:
    if p is None:
        return ""
    return "< 0.001" if p < 0.0005 else f"{p:.3f}"


def _correlation(values: Sequence[float | None]) -> Cell:
    known = [value for value in values if value is not None]
    return _text(f"{statistics.fmean(known):+.2f}" if known else "")


def _as_shown(cell: Cell) -> float:
    """Figures that are shown alike are alike."""
    return float(_percent(cell.mean or 0.0))


def _ranked(rows: list[Row], skip: int) -> list[Row]:
    """Best and second of each column of figures; nothing in a column of one, or where all are alike."""
    ranked = [list(row.cells) for row in rows]
    for column in range(skip, len(rows[0].cells) if rows else 0):
        order = sorted(
            {_as_shown(row.cells[column]) for row in rows if row.cells[column].mean is not None}, reverse=True
        )
        for cells in ranked:
            cell = cells[column]
            if cell.mean is not None and len(order) > 1 and _as_shown(cell) in order[:2]:
                cells[column] = replace(cell, text="", rank=1 + order.index(_as_shown(cell)))
    return [Row(row.name, cells, row.published) for row, cells in zip(rows, ranked, strict=True)]


# --- forms -------------------------------------------------------------------------------------------------------------


def _percent(mean: float) -> str:
    return f"{100 * mean:.1f}"


def cell_text(cell: Cell, plus_minus: str = " ± ") -> str:
    if cell.text or cell.mean is None:
        return cell.text
    spread = "" if cell.deviation is None else f"{plus_minus}{100 * cell.deviation:.1f}"
    return f"{_percent(cell.mean)}{spread}"


def markdown(tables: Sequence[Table]) -> str:
    return "\n".join(_markdown(table) for table in tables)


def _markdown(table: Table) -> str:
    marks: dict[int, Callable[[str], str]] = {0: str, 1: "**{}**".format, 2: "<u>{}</u>".format}
    lines = [f"## {table.title}", "", f"| | {' | '.join(table.columns)} |", "|---" * (1 + len(table.columns)) + "|"]
    for row in table.rows:
        name = f"*{row.name}*" if row.published else row.name
        cells = [marks[cell.rank](cell_text(cell)).replace("|", "\\|") for cell in row.cells]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in table.notes), ""])


_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
_LATEX = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{c: f"${c}$" for c in "<>|"},  # in text, the usual fonts have other signs there
}


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def latex(tables: Sequence[Table]) -> str:
    """Needs \\usepackage{booktabs}."""
    return "% needs \\usepackage{booktabs}\n" + "\n".join(_latex(table) for table in tables)


def _latex(table: Table) -> str:
    marks: dict[int, Callable[[str], str]] = {0: str, 1: "\\textbf{{{}}}".format, 2: "\\underline{{{}}}".format}
    lines = [f"\\begin{{tabular}}{{l{'l' * table.text_columns}{'r' * (len(table.columns) - table.text_columns)}}}"]
    lines += ["\\toprule", " & ".join(["", *map(_escaped, table.columns)]) + r" \\", "\\midrule"]
    before = False
    for row in table.rows:
        if row.published and not before:
            lines.append("\\midrule")
        before = row.published
        name = f"\\textit{{{_escaped(row.name)}}}" if row.published else _escaped(row.name)
        lines.append(" & ".join([name, *(marks[c.rank](_escaped(cell_text(c))) for c in row.cells)]) + r" \\")
    lines += ["\\bottomrule", "\\end{tabular}", *(f"% {note}" for note in table.notes)]
    return f"% {table.title}\n" + "\n".join(lines) + "\n"


def _csv_cell(text: str) -> str:
    """A plain number as such. Other text that a spreadsheet would take for a formula gets an apostrophe."""
    if _NUMBER.fullmatch(text):
        return text.removeprefix("+")
    return f"'{text}" if text.startswith(("+", "-", "=", "@")) else text


def long_csv(tables: Sequence[Table]) -> str:
    """A line per cell: fractions, and text as it is."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "row", "published", "column", "mean", "deviation", "count", "text"])
    for table in tables:
        for row in table.rows:
            for column, cell in zip(table.columns, row.cells, strict=True):
                mean, deviation = ("" if v is None else f"{v:.6f}" for v in (cell.mean, cell.deviation))
                about = [table.title, row.name, str(row.published).lower(), column]
                writer.writerow([*about, mean, deviation, cell.count or "", _csv_cell(cell.text)])
    return text.getvalue()
