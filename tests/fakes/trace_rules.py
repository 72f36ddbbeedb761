"""What Perfetto drops from a Chrome trace, or puts elsewhere: the rules of its importer, as sentences about events."""

import collections
import itertools

TIMED = "Xsf"


def faults(events):
    """A sentence for each event of the trace that a viewer would lose."""
    timed = [event for event in events if event["ph"] in TIMED]
    return [*_numbers(timed), *_threads(events, timed), *_overlaps(timed), *_arrows(timed)]


def _numbers(timed):
    for event in timed:
        for name in ("ts", *(["dur"] if event["ph"] == "X" else [])):
            if not isinstance(event[name], int) or event[name] < 0:
                yield f"{event['name']}: {name}={event[name]!r} is no whole number of microseconds"


def _threads(events, timed):
    """Thread 0 is the machine's idle one, and a thread's number counts in the whole trace."""
    labels = {kind: {event[key] for event in events if event["ph"] == "M" and event["name"] == kind}
              for kind, key in (("process_name", "pid"), ("thread_name", "tid"))}  # fmt: skip
    processes = collections.defaultdict(set)
    for event in timed:
        processes[event["tid"]].add(event["pid"])
        if event["pid"] not in labels["process_name"] or event["tid"] not in labels["thread_name"]:
            yield f"{event['name']}: process {event['pid']} or thread {event['tid']} has no name"
    for tid, owners in processes.items():
        if tid == 0 or len(owners) > 1:
            yield f"thread {tid} is one of the processes {sorted(owners)}"


def _slices(timed):
    rows = collections.defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return {tid: sorted(row) for tid, row in rows.items()}


def _overlaps(timed):
    for tid, row in _slices(timed).items():
        for (_, end), (begin, _) in itertools.pairwise(row):
            if begin < end:
                yield f"thread {tid}: a slice begins {end - begin} microseconds before the one ahead of it ends"


def _arrows(timed):
    slices, ends = _slices(timed), collections.defaultdict(list)
    for event in timed:
        if event["ph"] in "sf":
            ends[event["cat"], event["id"]].append(event)
            if not any(begin <= event["ts"] <= end for begin, end in slices.get(event["tid"], [])):
                yield f"{event['name']}: an arrow's {event['ph']} at {event['ts']} is in no slice of thread {event['tid']}"
    for (name, id), both in ends.items():
        phases, times = [event["ph"] for event in both], [event["ts"] for event in both]
        if sorted(phases) != ["f", "s"] or times[phases.index("s")] > times[phases.index("f")]:
            yield f"{name}: arrow {id} is {'-'.join(phases)} at {times}"
