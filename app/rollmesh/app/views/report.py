"""report.html and report.png: the result of a run, in one self-contained file.

The run folder is the only input. Collaborators: `figure` (plots), `summary`, `series`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from html import escape

from rollmesh.app.run_folder import Origin, RunFolder
from rollmesh.app.views.divergence import divergence_text
from rollmesh.app.views.series import Eval, Series, heldout_name
from rollmesh.app.views.summary import Summary, learner_metrics
from rollmesh.shared.process.interpreter_tuning import without_collections

_log = logging.getLogger(__name__)

_CSS = """
:root{--ink:#1f2933;--muted:#6b7785;--line:#e4e7eb;--accent:#0b6e99}
*{box-sizing:border-box}
body{margin:0;background:#f6f7f9;color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:36px 24px 64px}
h1{font-size:26px;margin:0}h2{font-size:16px;margin:36px 0 12px}
.sub{color:var(--muted);margin:4px 0 24px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(185px,1fr));gap:12px}
.card,.panel{background:#fff;border:1px solid var(--line);border-radius:10px;padding:14px 16px}
.card b{display:block;white-space:nowrap;font-size:21px;font-variant-numeric:tabular-nums}
.card span{color:var(--muted);font-size:13px}
.panel{margin-top:16px;overflow-x:auto}.panel svg{width:100%;height:auto;min-width:900px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px;text-align:right;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}
th{color:var(--muted);font-weight:600;font-size:13px}tr:last-child td{border-bottom:0}
pre{margin:0;overflow-x:auto;font-size:13px}details{margin-top:16px}summary{cursor:pointer;color:var(--accent)}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(340px,1fr));gap:16px;align-items:start}
"""


def write_report(folder: RunFolder, series: Series, summary: Summary) -> None:
    """Write both files. Without matplotlib the page has only tables, and the PNG is not written."""
    svg = _pictures(folder, series, summary)
    folder.report.write_text(render_page(folder, series, summary, svg), encoding="utf-8")


def _pictures(folder: RunFolder, series: Series, summary: Summary) -> str:
    try:
        with without_collections():
            from rollmesh.app.views import figure
    except ModuleNotFoundError as err:
        _log.warning("report without plots: %s; pip install 'rollmesh[trainer]'", err)
        return ""
    drawn = figure.draw(series, summary, learner_metrics(folder.metrics))
    folder.picture.write_bytes(figure.to_png(drawn))
    return figure.to_svg(drawn)


def render_page(folder: RunFolder, series: Series, summary: Summary, svg: str) -> str:
    """Return the page as HTML. All data are escaped."""
    origin = folder.read_origin()
    title = f"{summary.run}, seed {summary.seed}"
    body = [
        f"<h1>{escape(title)}</h1><p class=sub>{escape(_subtitle(summary, origin))}</p>",
        _cards(summary),
        *(_panel(f"<b>Rewards:</b> {escape(divergence_text(one))}") for one in summary.reward_divergences),
        f"<div class=panel>{svg}</div>" if svg else "",
        f"<h2>{heldout_name(summary.heldout_graded).capitalize()} by evaluation</h2>"
        + _panel(_eval_table(series.evals_by_step)),
        _beside(
            ("Samples", _panel(_sample_table(summary))),
            ("Time of the learner by phase", _panel(_time_table(summary))),
        ),
        _source_table(summary),
        _checkpoint(summary),
        _details("Command, versions", _origin_text(origin)),
        _details("Resolved configuration", folder.config.read_text(encoding="utf-8")),
    ]
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{escape(title)}</title>"
    page = f"<head>{head}<style>{_CSS}</style></head><body><main>{''.join(body)}</main></body>"
    return f"<!doctype html><html lang=en>{page}</html>\n"


def _subtitle(summary: Summary, origin: Origin) -> str:
    outcomes = {
        "finished": "finished",
        "interrupted": "interrupted, can be resumed",
        "failed": "failed, can be resumed",
    }
    facts = [outcomes[summary.outcome], f"recipe {summary.recipe}", f"staleness bound {summary.eta}"]
    return " · ".join([*facts, f"started {origin.started_at}"])


def _cards(summary: Summary) -> str:
    before, after = summary.heldout_success_before, summary.heldout_success_after
    cards = [
        (heldout_name(summary.heldout_graded), f"{_share(before)} → {_share(after)}"),
        ("updates", f"{summary.updates:,}"),
        ("largest staleness", "–" if summary.lag_max is None else f"{summary.lag_max} of {summary.eta}"),
        ("seconds, warm start included", f"{summary.wall_s:,.0f}"),
        ("tokens generated", f"{summary.tokens_generated:,}"),
        ("tokens trained", f"{summary.tokens_trained:,}"),
    ]
    cells = (f"<div class=card><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in cards)
    return f"<div class=cards>{''.join(cells)}</div>"


def _eval_table(evals: Sequence[Eval]) -> str:
    labels = sorted({label for e in evals for label in e.success_by_label})
    rows = [
        [
            f"{e.step}" + ("" if e.complete else " (incomplete)"),
            f"{e.time_s:.0f}",
            f"{e.num_samples}",
            _share(e.success),
        ]
        + [_share(e.success_by_label.get(label)) for label in labels]
        for e in evals
    ]
    return _table(
        [
            "update",
            "seconds",
            "tasks",
            "reward" if any(e.graded for e in evals) else "success",
            *(label.replace("=", " ") for label in labels),
        ],
        rows,
    )


def _sample_table(summary: Summary) -> str:
    reserved = max(1, summary.samples.get("reserved", 0))
    rows = []
    for end, count in summary.samples.items():
        rows.append([end, f"{count:,}", f"{count / reserved:.1%}"])
        details = sorted(item for item in summary.reasons.items() if item[0].startswith(f"{end}/"))
        rows += [[f"\u2003{name.partition('/')[2]}", f"{n:,}", f"{n / reserved:.1%}"] for name, n in details]
    if summary.replay:
        most = max((lag for lag, num in summary.replayed_by_staleness.items() if num), default=None)
        age = "" if most is None else f", largest staleness {most}"
        rows += [
            [f"replayed: {end}{age if end == 'trained' else ''}", f"{n:,}", ""] for end, n in summary.replay.items()
        ]
    return _table(["", "samples", "share"], rows)


def _source_table(summary: Summary) -> str:
    """Return requested and trained shares of the sources, and their held-out success; empty without a mixture."""
    before, after = summary.heldout_by_label_before, summary.heldout_by_label_after
    rows = [
        [
            shares.source,
            _share(shares.requested),
            _share(shares.trained),
            f"{_share(before.get(label))} → {_share(after.get(label))}",
        ]
        for shares in summary.source_shares
        for label in [f"source={shares.source}"]
    ]
    head = ["source", "share of draws, requested", "share of trained groups", heldout_name(summary.heldout_graded)]
    return f"<h2>Sources of the tasks</h2>{_panel(_table(head, rows))}" if rows else ""


def _time_table(summary: Summary) -> str:
    other = max(0.0, summary.train_s - sum(summary.learner_seconds.values()))
    seconds = {**summary.learner_seconds, "other": other, "warm start": summary.warm_start_s}
    total = max(summary.wall_s, 1e-9)
    return _table(["phase", "seconds", "share"], [[k, f"{s:.1f}", f"{s / total:.0%}"] for k, s in seconds.items()])


def _checkpoint(summary: Summary) -> str:
    if summary.checkpoint is None:
        return ""
    code = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"folder = {summary.checkpoint!r}\n"
        "model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)\n"
    )
    return f"<h2>The checkpoint is a plain transformers folder</h2>{_panel(f'<pre>{escape(code)}</pre>')}"


def _origin_text(origin: Origin) -> str:
    packages = "\n".join(f"{name} {version}" for name, version in origin.packages.items())
    return f"{' '.join(origin.command)}\n\npython {origin.python}\n{origin.platform}\n{packages}"


def _details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{_panel(f'<pre>{escape(text)}</pre>')}</details>"


def _panel(inner: str) -> str:
    return f"<div class=panel>{inner}</div>"


def _beside(*parts: tuple[str, str]) -> str:
    return f"<div class=two>{''.join(f'<div><h2>{escape(title)}</h2>{inner}</div>' for title, inner in parts)}</div>"


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
