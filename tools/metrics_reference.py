"""Write docs/reference/metrics.md from the table of metrics, and the dashboard for Grafana beside it.

    python -m tools.metrics_reference

`make docs` runs this, and a test compares both files with what this makes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import covey.metrics
from covey.base.settings import LANES
from covey.runtime.counters import CODECS_LIMIT
from covey.runtime.metrics.samples import BOUNDS, LABELLED_PEERS, OTHER_PEERS, TABLE

REFERENCE: Final = Path(__file__).parents[1] / "docs" / "reference"
PAGE: Final = REFERENCE / "metrics.md"
DASHBOARD: Final = REFERENCE / "grafana-dashboard.json"
HEAD: Final = """\
# Metrics

<!-- Made by `python -m tools.metrics_reference` from the table of metrics: do not edit. -->

What `covey run --http`, `covey.serve_http` and `covey.metrics.register` show.
[Metrics and traces](../guides/metrics.md) explains how to use them; [a dashboard for Grafana](grafana-dashboard.json)
shows the most important ones.

Counters begin at 0 when the process starts, and count all groups that the process has had. On the page of `covey run`,
every metric also has the label `rank`.

| metric | kind | labels | meaning |
|---|---|---|---|
"""
TAIL: Final = f"""
| label | values |
|---|---|
| `op` | the name of the operation: `all_reduce`, `barrier` and so on |
| `lane` | the kind of lane: {", ".join(f"`{lane}`" for lane in LANES[1:])} or `memory` |
| `peer` | the seat of the other process: its rank in the first generation; `{OTHER_PEERS}` from {LABELLED_PEERS} on |
| `codec` | the codec, such as `int8`; `other` after the first {CODECS_LIMIT} of a group |
| `kind` | the kind of event, as in `group.events()` |
| `rank` | the rank in the current generation |

The buckets of `covey_operation_seconds` end at {BOUNDS[0][0]} s, each further one at four times that, and the last but
one at {BOUNDS[-2][0]} s.

## Python
"""
PANELS: Final = (
    ("Ranks that answer", "sum(covey_up)", "", "short"),
    ("Members of the view", "max(covey_members)", "", "short"),
    ("Share of time in communication", "covey_communication_share", "rank {{rank}}", "percentunit"),
    ("Operations a second", "sum by (op) (rate(covey_operations_total[1m]))", "{{op}}", "ops"),
    (
        "Time of an operation, median",
        "histogram_quantile(0.5, sum by (op, le) (rate(covey_operation_seconds_bucket[1m])))",
        "{{op}}",
        "s",
    ),
    (
        "Time of an operation, 99th percentile",
        "histogram_quantile(0.99, sum by (op, le) (rate(covey_operation_seconds_bucket[1m])))",
        "{{op}}",
        "s",
    ),
    ("Operation in progress", "covey_operation_running_seconds", "rank {{rank}}", "s"),
    ("Sent by operations", "sum by (rank) (rate(covey_operation_sent_bytes_total[1m]))", "rank {{rank}}", "Bps"),
    ("Sent over lanes", "sum by (lane) (rate(covey_lane_sent_bytes_total[1m]))", "{{lane}}", "Bps"),
    (
        "Times smaller by compression",
        "sum by (codec) (rate(covey_compressed_plain_bytes_total[5m]))"
        " / sum by (codec) (rate(covey_compressed_sent_bytes_total[5m]))",
        "{{codec}}",
        "short",
    ),
    ("Failures", "sum by (op) (increase(covey_operation_failures_total[5m]))", "{{op}}", "short"),
    ("Losses, joins and other events", "sum by (kind) (increase(covey_events_total[5m]))", "{{kind}}", "short"),
    ("Elections", "sum(increase(covey_elections_total[5m]))", "", "short"),
    ("Calls a second", "sum by (rank) (rate(covey_calls_total[1m]))", "rank {{rank}}", "ops"),
    (
        "Pings without an answer",
        "sum by (rank) (rate(covey_heartbeats_sent_total[1m]) - rate(covey_heartbeats_answered_total[1m]))",
        "rank {{rank}}",
        "short",
    ),
)
"""Title, query, legend and unit."""


def page() -> str:
    """Return the text of the page."""
    rows = (
        f"| `{row.name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels)} | {row.help} |\n"
        for row in TABLE
    )
    names = (f"\n::: covey.metrics.{name}\n" for name in covey.metrics.__all__)
    return HEAD + "".join(rows) + TAIL + "".join(names)


def dashboard() -> str:
    """Return the dashboard, as Grafana imports it."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels: list[dict[str, Any]] = [
        {
            "id": number + 1,
            "title": title,
            "type": "timeseries",
            "datasource": source,
            "gridPos": {"x": 8 * (number % 3), "y": 8 * (number // 3), "w": 8, "h": 8},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [{"refId": "A", "datasource": source, "expr": query, "legendFormat": legend or title}],
        }
        for number, (title, query, legend, unit) in enumerate(PANELS)
    ]
    made = {
        "title": "covey",
        "uid": "covey",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [{"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}]},
        "panels": panels,
    }
    return json.dumps(made, indent=1) + "\n"


def main() -> None:
    PAGE.write_text(page())
    DASHBOARD.write_text(dashboard())


if __name__ == "__main__":
    main()
