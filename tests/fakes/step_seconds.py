"""Holds the metrics of a run against the law of its lanes."""


def unaccounted(rows):
    """The largest share of a step's time, behind the first one, that a lane of these metrics does not tell of."""
    steps, shares = [row for row in rows if "time/step_s" in row][1:], []
    assert steps
    for row in steps:
        for lane in ("trainer", "instances", "controller"):
            spent = [s for name, s in row.items() if name.startswith(f"seconds/{lane}/")]
            assert spent and min(spent) >= 0 and not any("rest" in name.split("_") for name in row)
            shares.append(abs(sum(spent) / row["time/step_s"] - 1))
    return max(shares)
