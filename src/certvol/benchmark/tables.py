"""Make the tables of a benchmark: accuracies, losses, gains, claims, validators and a ranking."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from certvol.benchmark import claims, ranking, significance
from certvol.benchmark.published import published_losses, published_rows
from certvol.benchmark.results import DONE, Result, means_of_seeds
from certvol.benchmark.significance import PairedTest, rank_correlation
from certvol.benchmark.suite import Suite
from certvol.benchmark.table_formats import Cell, Row, Table, mean_and_deviation
from certvol.progress import percent
from certvol.scores.validators import VALIDATORS

AVERAGE, ORACLE = "average", "oracle (unattainable)"
P_OVER_TASKS = "p over tasks"
NAMED_RUNS = 6  # in a note
OPPOSITE = {"less": "more", "more": "less", "sooner": "later"}
LOSSES = {claims.BASIC: "Basic", claims.WITHOUT_SAMPLES: "No samples CE", claims.FULL: "Full CVP"}
CLAIM_VERDICTS = {
    significance.TOO_FEW: "undecided: too few runs",
    significance.NOISE: "undecided at this noise",
    significance.POSITIVE: "seen",
    significance.NEGATIVE: "not seen: the opposite",
}
GAIN_VERDICTS = {
    significance.TOO_FEW: "undecided: too few pairs to tell a gain from noise",
    significance.NOISE: "within the noise",
    significance.POSITIVE: "a gain above the noise",
    significance.NEGATIVE: "a loss above the noise",
}
NO_SCORES = {
    "sigma": "these methods have no sigma",
    "source_accuracy": "no source images are held out (`data.holdout` is 0), or the method has "
    "no cycles",
}
WATCHED_NOTE = (
    "The validator's choice and the oracle come from the predictions that each run keeps per cycle "
    "on some fixed target images (`guard.images`). To compare them, we add the difference on these "
    "images to the delivered model's accuracy on the whole target."
)


def all_tables(
    suite: Suite, results: Sequence[Result], validator: str, baseline: str | None
) -> list[Table]:
    """Return the tables of `table.md`, with tasks and methods in the order of the results."""
    done = [result for result in results if result.status == DONE]
    methods = list(dict.fromkeys(result.method for result in results))
    tasks = list(dict.fromkeys(result.task for result in results))
    shown = [[task] for task in tasks] if suite.metric == "mean_class_accuracy" else [tasks]
    tables = [accuracy_table(suite, done, methods, each, validator) for each in shown]
    if sum(any(result.method == method for result in done) for method in LOSSES) > 1:
        tables.append(loss_table(suite, done, tasks))
    if baseline is not None and (gains := gain_table(done, methods, baseline)).rows:
        tables.append(gains)
    if findings := claims.find(done):
        tables.append(claim_table(findings))
    if any(result.cycles is not None for result in done):
        tables.append(validator_table(done))
    if (ranked := ranking_of(done)) is not None:
        tables.append(ranked)
    return tables


def ranking_of(done: Sequence[Result]) -> Table | None:
    """Rank methods by their last cycle; None if there are too few methods or tasks."""
    accuracies: dict[tuple[str, str], list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for result in done:
        if result.last is not None:
            accuracies.setdefault((result.method, result.task), []).append(result.last)
        if result.cpu_seconds is not None:
            seconds.setdefault(result.method, []).append(result.cpu_seconds)
    found = ranking.rank(ranking.mean_by_task(accuracies))
    means = {method: statistics.fmean(own) for method, own in seconds.items()}
    return None if found is None else ranking.ranking_table(found, means)


def accuracy_table(
    suite: Suite, done: Sequence[Result], methods: list[str], tasks: list[str], validator: str
) -> Table:
    """Show accuracies by task or, if the suite's metric is by class, those of one task by class.

    A run measures the classes of the delivered model only; a table by task shows the last cycle's.
    """
    by_class = suite.metric == "mean_class_accuracy"
    names, column = (suite.classes_of(tasks[0]), "delivered") if by_class else (tasks, "last")
    done = [result for result in done if result.task in tasks]
    rows, notes = [], [_seeds_note(done, methods, tasks)]
    for method in methods:
        own = [result for result in done if result.method == method]
        cells = [_class_mean(own, n) if by_class else _mean(own, n) for n in names]
        averages = [_average(own, tasks, name) for name in (column, "selected", "oracle")]
        others = [run for run in own if not run.delivers_last]
        about = [_text(_backbones(own)), _text("delivered" if by_class and others else "last")]
        rows.append(Row(method, [*about, *cells, *averages]))
        if others:
            runs = [
                f"{run.task} seed {run.seed} ({percent(run.delivered)}, last {percent(run.last)})"
                for run in others[:NAMED_RUNS]
            ]
            more = f" and {len(others) - NAMED_RUNS} more" if len(others) > NAMED_RUNS else ""
            notes.append(
                f"{method}: the guard or `guard.select` delivered another model than the last "
                f"cycle's in {', '.join(runs)}{more}. This table shows the {column} one."
            )
    notes += _validator_notes(done, methods, validator)
    theirs, their_notes = published_rows(suite, names, tasks[0] if by_class else None)
    chosen = f"chosen by validator ({validator})"
    columns = ["backbone", "checkpoint", *names, "mean" if by_class else AVERAGE, chosen, ORACLE]
    of = f", {tasks[0]}: accuracy per class" if by_class else ": target accuracy"
    title = f"{suite.name}{of}, %, mean and standard deviation over seeds"
    return Table(title, columns, _ranked(rows, skip=2) + theirs, 2, notes + their_notes)


def loss_table(suite: Suite, done: Sequence[Result], tasks: Sequence[str]) -> Table:
    """Compare the paper's losses, on the tasks for which there are runs of these methods."""
    shown = [task for task in tasks if any(r.task == task and r.method in LOSSES for r in done)]
    rows = []
    for method, name in LOSSES.items():
        own = [result for result in done if result.method == method]
        if own:
            oscillations = [r.measured["oscillation"] for r in own if "oscillation" in r.measured]
            oscillation = f"{statistics.fmean(oscillations):.1f}" if oscillations else ""
            cells = [*(_mean(own, task) for task in shown), _average(own, shown, "last")]
            about = [_text(method), _text(_backbones(own))]
            rows.append(Row(name, [*about, *cells, _text(oscillation)]))
    theirs, their_notes = published_losses(suite, shown)
    title = f"the losses: {suite.metric.replace('_', ' ')} of the target, %, and oscillation"
    columns = ["method", "backbone", *shown, AVERAGE, "oscillation"]
    note = (
        "Oscillation of the decision boundary: mean over runs, less is smoother. Compare it only "
        "on the same images."
    )
    rows = _ranked(rows, skip=2) + theirs
    return Table(title, columns, rows, 2, [note, *their_notes])


def gain_table(done: Sequence[Result], methods: list[str], baseline: str) -> Table:
    def last_by_pair(method: str) -> dict[tuple[str, int], float]:
        own = [run for run in done if run.method == method]
        return {(run.task, run.seed): run.last for run in own if run.last is not None}

    base, rows = last_by_pair(baseline), []
    for method in methods:
        own = last_by_pair(method)
        by_pair = {pair: own[pair] - base[pair] for pair in own if pair in base}
        if method == baseline or not by_pair:
            continue
        test = PairedTest(by_pair)
        words = _p(test.p), _p(test.p_over_tasks), GAIN_VERDICTS[test.outcome]
        gain = mean_and_deviation(test.differences)
        rows.append(Row(method, [gain, *map(_text, (str(gain.count), *words))]))
    title = f"gain over {baseline} in points, over pairs of the same task and seed"
    notes = [
        "p: two-sided test by flipping the signs of the paired differences; not corrected for "
        "several comparisons.",
        "Seeds of one task are not independent tasks: a gain here holds for these tasks.",
    ]
    columns = ["mean gain", "pairs", "p", P_OVER_TASKS, "verdict"]
    return _fit_p_over_tasks(Table(title, columns, rows, notes=notes))


def claim_table(findings: Sequence[tuple[claims.Claim, PairedTest]]) -> Table:
    rows = []
    for claim, test in findings:
        effect = mean_and_deviation(test.differences)
        p = _p(test.p) if effect.count > 1 else ""
        words = str(effect.count), p, _p(test.p_over_tasks), CLAIM_VERDICTS[test.outcome]
        name = f"({claim.letter}) {claim.words}"
        rows.append(Row(name, [_text(word) for word in (_effect(claim, effect), *words)]))
    note = (
        "p: as above, for no effect; `seen` and `not seen` mean p below 0.05 and hold for these "
        "tasks."
    )
    columns = ["mean and standard deviation", "tasks x seeds", "p", P_OVER_TASKS, "verdict"]
    title = "the paper's claims on these runs"
    return _fit_p_over_tasks(Table(title, columns, rows, notes=[note]))


def _effect(claim: claims.Claim, cell: Cell) -> str:
    """Format an effect as `12.0 ± 3.0 % less`; give it a sign if its unit names no direction."""
    mean, digits = cell.mean or 0.0, claim.digits
    spread = "" if cell.deviation is None else f" ± {cell.deviation:.{digits}f}"
    *unit, direction = claim.unit.split(" ")
    if direction not in OPPOSITE:
        return f"{mean:+.{digits}f}{spread} {claim.unit}".strip()
    direction = direction if mean >= 0 else OPPOSITE[direction]
    return f"{abs(mean):.{digits}f}{spread} {' '.join([*unit, direction])}"


def _fit_p_over_tasks(table: Table) -> Table:
    """Explain the column of p over tasks, or drop it if there are too few tasks."""
    place = table.columns.index(P_OVER_TASKS)
    if any(row.cells[place].shown() for row in table.rows):
        note = f"`{P_OVER_TASKS}`: the same test with each task's mean as one difference."
        return replace(table, notes=[*table.notes, note])
    rows = [replace(row, cells=row.cells[:place] + row.cells[place + 1 :]) for row in table.rows]
    columns = table.columns[:place] + table.columns[place + 1 :]
    return replace(table, columns=columns, rows=rows)


def validator_table(done: Sequence[Result]) -> Table:
    """Compare each validator with the true accuracy, which only a benchmark knows."""
    adapted = [(r.task, r.cycles) for r in done if r.cycles is not None]
    rows = []
    for name in VALIDATORS:
        own = [(task, cycles) for task, cycles in adapted if name in cycles.scores]
        within = [rank_correlation(cycles.scores[name], cycles.accuracy) for _, cycles in own]
        by_task: dict[str, tuple[list[float], list[float]]] = {}
        for task, cycles in own:
            scores, accuracy = by_task.setdefault(task, ([], []))
            scores += cycles.scores[name]
            accuracy += cycles.accuracy
        across = [rank_correlation(*both) for both in by_task.values()]
        gains = [
            cycles.accuracy[chosen] - cycles.accuracy[-1]
            for _, cycles in own
            if (chosen := cycles.chosen_by(name)) is not None
        ]
        # ensv compares the cycles of one run
        correlations = _correlation(within), _text("") if name == "ensv" else _correlation(across)
        rows.append(Row(name, [*correlations, mean_and_deviation(gains), _text(str(len(own)))]))
    best = mean_and_deviation([max(c.accuracy) - c.accuracy[-1] for _, c in adapted])
    rows.append(Row(ORACLE, [_text(""), _text(""), best, _text(str(len(adapted)))]))
    title = (
        "validators: rank correlation with target accuracy, and gain of their choice over the "
        "last cycle"
    )
    columns = ["within a run", "within a task", "gain, points", "runs"]
    note = "Spearman's correlation; 1 is a perfect validator. Means over runs and over tasks."
    return Table(title, columns, rows, notes=[note])


def _mean(own: Sequence[Result], task: str) -> Cell:
    return mean_and_deviation([r.last for r in own if r.task == task and r.last is not None])


def _class_mean(own: Sequence[Result], name: str) -> Cell:
    return mean_and_deviation([v for r in own if (v := r.per_class.get(name)) is not None])


def _average(own: Sequence[Result], tasks: Sequence[str], column: str) -> Cell:
    """Average the means of the tasks; the deviation is over seeds that have all tasks.

    The cell is empty if a task is missing.
    """
    per_task = [
        [value for r in own if r.task == task and (value := getattr(r, column)) is not None]
        for task in tasks
    ]
    if not tasks or not all(per_task):
        return Cell()
    spread = mean_and_deviation(means_of_seeds(own, tasks, column)).deviation
    mean = statistics.fmean(map(statistics.fmean, per_task))
    return Cell(mean, spread, sum(map(len, per_task)))


def _backbones(own: Sequence[Result]) -> str:
    return ", ".join(sorted({result.backbone for result in own}))


def _validator_notes(done: Sequence[Result], methods: list[str], validator: str) -> list[str]:
    if all(result.cycles is None for result in done):
        return []
    without = [m for m in methods if any(r.method == m and r.selected is None for r in done)]
    if not without:
        return [WATCHED_NOTE]
    reason = NO_SCORES.get(validator, "their runs have no such score")
    return [WATCHED_NOTE, f"No choice by {validator} for {', '.join(without)}: {reason}."]


def _seeds_note(done: Sequence[Result], methods: list[str], tasks: list[str]) -> str:
    counts = [sum(r.method == m and r.task == t for r in done) for m in methods for t in tasks]
    if not counts:
        return "No runs."
    if min(counts) < max(counts):
        return f"{min(counts)} to {max(counts)} seeds per cell, so some means are less reliable."
    return f"{counts[0]} {'seed' if counts[0] == 1 else 'seeds'} per cell."


def _ranked(rows: list[Row], skip: int) -> list[Row]:
    """Mark best and second of each column after `skip`; cells that look equal rank equal."""
    ranked = [list(row.cells) for row in rows]
    for column in range(skip, len(rows[0].cells) if rows else 0):
        shown = [percent(row.cells[column].mean) for row in rows]
        order = sorted({text for text in shown if text}, key=float, reverse=True)
        for cells, text in zip(ranked, shown, strict=True):
            if len(order) > 1 and text in order[:2]:
                cells[column] = replace(cells[column], rank=1 + order.index(text))
    return [Row(row.name, cells) for row, cells in zip(rows, ranked, strict=True)]


def _text(words: str) -> Cell:
    return Cell(text=words)


def _p(p: float | None) -> str:
    if p is None:
        return ""
    return "< 0.001" if p < 0.0005 else f"{p:.3f}"


def _correlation(values: Sequence[float | None]) -> Cell:
    known = [value for value in values if value is not None]
    return _text(f"{statistics.fmean(known):+.2f}" if known else "")
