"""What a run looks like: one self-contained HTML page of one or several workdirs.

    load.py (files -> RunData), audit.py (its journal) -> findings.py, curves.py, timeline.py, samples.py -> page.py
    (HTML)

Consumes the files that a run writes (metrics.jsonl, timeline.jsonl, instances.json, samples/, config.json,
journal/); needs neither JAX nor the network. Law: a file that is absent, cut short or holds nonsense takes its part of
the page away and is named there; it never fails the report.
"""
