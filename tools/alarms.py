"""Writes deploy/kubernetes/components/monitoring/alarms.yaml from deploy/prometheus/alerts.yml.

    python -m tools.alarms

Owns: the PrometheusRule around the rules. Does not own: the rules, which stay in Prometheus' own
format, so that a Prometheus without the operator loads them as they are.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Final

_DEPLOY: Final = Path(__file__).resolve().parents[1] / "deploy"
TARGET: Final = _DEPLOY / "kubernetes" / "components" / "monitoring" / "alarms.yaml"

_HEAD: Final = """\
# Made from deploy/prometheus/alerts.yml by `python -m tools.alarms`: change the rules there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ister
  labels: {app.kubernetes.io/name: ister}
spec:
"""


def render() -> str:
    """Returns the alarms as a resource of the Prometheus operator."""
    rules = (_DEPLOY / "prometheus" / "alerts.yml").read_text()
    return _HEAD + textwrap.indent(rules[rules.index("groups:\n") :], "  ")


if __name__ == "__main__":
    TARGET.write_text(render())
