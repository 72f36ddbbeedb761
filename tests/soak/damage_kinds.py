"""Random damage to a kept workdir: what storage, power cuts and people do to files.

Consumes a copy of a workdir and a random source; changes the copy, and produces a `Damage`: what was done, and the
least that a resume must still reach. Law: the same random source does the same to the same workdir.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.soak.damage_truth import Allowed, Resumed, Truth

BLOCK = 4096
GARBAGE: tuple[bytes, ...] = (
    b"7",
    b"null",
    b'"text"',
    b"[1, 2]",
    b"{",
    b'{"a": 1}',
    b'{"step": "x"}',
    b'{"step": null}',
    b'{"step": [3]}',
)
GARBAGE += (b'{"step": 1e999}', b'{"step": NaN}', b"\xff\xfe\x00garbage", b"\x00" * 64, b'{"step": true}', b"1" * 5000)
LINES = ("metrics.jsonl", "samples/*.jsonl", "timeline.jsonl")
TEXTS = ("config.json", "overrides.json", "instances.json", "trace.json", "evaluations/*")
REST = (*LINES[1:], *TEXTS, "trajectories.txt", "tensorboard/*", "journal/lock")


@dataclasses.dataclass(frozen=True)
class Damage:
    subject: str
    what: str  # a sentence
    allowed: Allowed


# ---------------------------------------------------------------- one file


def flip(content: bytes, draw: random.Random) -> tuple[str, bytes, int]:
    at = draw.randrange(len(content))
    return "one bit flipped", content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :], at


def truncate(content: bytes, draw: random.Random) -> tuple[str, bytes, int]:
    at = draw.randrange(len(content))
    return "truncated", content[:at], at


def zeros(content: bytes, draw: random.Random) -> tuple[str, bytes, int]:
    at = draw.randrange(len(content))
    size = min(draw.randint(1, 512), len(content) - at)
    return "zeros", content[:at] + bytes(size) + content[at + size :], at


def zero_block(content: bytes, draw: random.Random) -> tuple[str, bytes, int]:
    at = draw.randrange(-(-len(content) // BLOCK)) * BLOCK
    size = min(BLOCK, len(content) - at)
    return "a block of zeros", content[:at] + bytes(size) + content[at + size :], at


def zero_tail(content: bytes, draw: random.Random) -> tuple[str, bytes, int]:
    at = draw.randrange(len(content))
    return "zeros to the end", content[:at] + bytes(len(content) - at), at


def empty(content: bytes, draw: random.Random) -> tuple[str, bytes, int]:
    return "empty", b"", 0


def garbage_tail(content: bytes, draw: random.Random) -> tuple[str, bytes, int]:
    return "random bytes behind its end", content + draw.randbytes(draw.randint(1, 100)), len(content)


EDITS = (flip, flip, flip, flip, truncate, truncate, zeros, zeros, zero_block, zero_tail, empty)


def edit(path: Path, draw: random.Random, kinds: Sequence[Callable] = EDITS) -> tuple[str, int]:
    """Changes a file; (what, the first byte that may differ)."""
    content = path.read_bytes()
    if not content:
        path.write_bytes(b"\0")
        return "a byte where there was none", 0
    what, changed, at = draw.choice(kinds)(content, draw)
    path.write_bytes(changed)
    return what, at


def replace_by_folder(path: Path, draw: random.Random) -> str:
    remove(path)
    path.mkdir()
    if draw.random() < 0.5:
        (path / "x").write_text("x")
    return "a folder in its place"


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def exchange(a: Path, b: Path) -> None:
    aside = a.with_name(a.name + ".exchanged")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


# ---------------------------------------------------------------- checkpoints


def checkpoint(folder: Path, truth: Truth, undamaged: Resumed, draw: random.Random) -> Damage:
    root = folder / "checkpoints"
    steps = sorted((path for path in root.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    hurt: set[str] = set()
    if draw.random() < 0.12:
        what = _beside_steps(root, steps, hurt, draw)
    else:
        count = draw.choices((1, 2, len(steps)), (12, 2, 1))[0]
        victims = (
            [steps[-1], *draw.sample(steps[:-1], min(count, len(steps)) - 1)]
            if count > 1
            else [steps[-1] if draw.random() < 0.8 else draw.choice(steps)]
        )
        what = "; ".join(f"{step.name}: {_one_step(step, draw)}" for step in victims)
        hurt |= {step.name for step in victims}
    good = [int(step.name) for step in steps if step.name not in hurt]
    # What runs at an older version goes on where that version can be made again: from a checkpoint at or before it.
    made_again = any(step <= min(undamaged.remade, default=truth.newest) for step in good)
    version = truth.newest if made_again else max(good, default=0)
    return Damage("checkpoint", what, Allowed(version, all_samples=made_again, refusal=not good))


def _beside_steps(root: Path, steps: Sequence[Path], hurt: set[str], draw: random.Random) -> str:
    """Folders and files that are no step of this run, and steps that change their names."""
    match draw.randrange(6):
        case 0:
            (root / str(int(steps[-1].name) + draw.randint(1, 9))).mkdir()
            return "an empty folder named as a later step"
        case 1:
            later = root / str(int(steps[-1].name) + draw.randint(1, 9))
            later.mkdir()
            (later / "manifest.json").write_bytes(draw.choice(GARBAGE))
            return "a later step that holds a manifest of garbage alone"
        case 2:
            (root / str(int(steps[-1].name) + draw.randint(1, 9))).write_bytes(draw.choice(GARBAGE))
            return "a file named as a later step"
        case 3:
            a, b = draw.sample(list(steps), 2)
            exchange(a, b)
            hurt |= {a.name, b.name}
            if draw.random() < 0.5:
                for step in (a, b):
                    (step / "manifest.json").unlink(missing_ok=True)
                return f"steps {a.name} and {b.name} exchanged, without manifests"
            return f"steps {a.name} and {b.name} exchanged"
        case 4:
            copy = root / str(int(steps[-1].name) + draw.randint(1, 9))
            shutil.copytree(steps[0], copy)
            bare = draw.random() < 0.5
            if bare:
                (copy / "manifest.json").unlink(missing_ok=True)
            return f"a copy of step {steps[0].name} as {copy.name}{', without a manifest' if bare else ''}"
        case _:
            (root / draw.choice(("x", "latest", ".DS_Store", "9.broken.txt"))).write_bytes(b"x")
            return "a file that nobody knows"


def _one_step(step: Path, draw: random.Random) -> str:
    files = sorted(path for path in step.rglob("*") if path.is_file() and path.name != "manifest.json")
    bare = draw.random() < 0.45  # the power was cut between rename and manifest; so was the kept run, perhaps
    bare |= not (step / "manifest.json").exists()
    if bare:
        (step / "manifest.json").unlink(missing_ok=True)
    described = "no manifest, " if bare else ""
    big = sorted(files, key=lambda path: path.stat().st_size)[-4:]
    victim = draw.choice(big) if draw.random() < 0.5 else draw.choice(files)
    name = victim.relative_to(step)
    match draw.choices(range(7), (12, 2, 2, 1, 1, 2, 1))[0]:
        case 0:
            return f"{described}{name}: {edit(victim, draw)[0]}"
        case 1:
            remove(victim)
            return f"{described}{name}: missing"
        case 2:
            if bare:
                return "no manifest"
            return f"manifest.json: {edit(step / 'manifest.json', draw)[0]}"
        case 3:
            return f"{described}{name}: {replace_by_folder(victim, draw)}"
        case 4:
            item = draw.choice(("params", "opt_state", "rl_state", "metrics"))
            remove(step / item)
            if draw.random() < 0.3:
                (step / item).mkdir()
            return f"{described}{item}: gone"
        case 5:
            other = draw.choice([path for path in files if path != victim])
            exchange(victim, other)
            return f"{described}{name} exchanged with {other.relative_to(step)}"
        case _:
            extra = draw.choice([step, *(path for path in step.rglob("*") if path.is_dir())]) / "extra"
            extra.write_bytes(draw.choice(GARBAGE))
            return f"{described}an extra file in {extra.parent.relative_to(step)}/"


# ---------------------------------------------------------------- journal

PREAMBLE, NUMBERED, UNNUMBERED = b"DORA", struct.Struct("<IIII"), struct.Struct("<II")  # size first, in both


def frames(content: bytes) -> list[bytes]:
    """The frames of a segment, and before them its preamble, where the segment has one."""
    header, at, found = UNNUMBERED, 0, []
    if content.startswith(PREAMBLE):
        header, at, found = NUMBERED, NUMBERED.size, [content[: NUMBERED.size]]
    while at < len(content):
        end = at + header.size + header.unpack_from(content, at)[0]
        found.append(content[at:end])
        at = end
    return found


def journal(folder: Path, truth: Truth, undamaged: Resumed, draw: random.Random) -> Damage:
    root = folder / "journal"
    segments = sorted(root.glob("*.log"))
    if draw.random() < 0.12:
        what = _beside_segments(root, segments, draw)
        return Damage("journal", what, Allowed(truth.newest, all_samples=True))
    victim = segments[-1] if draw.random() < 0.6 else draw.choice(segments)
    match draw.choices(range(5), (10, 5, 1, 1, 1))[0]:
        case 0:
            what, at = edit(victim, draw, (*EDITS, garbage_tail))
        case 1:
            what, at = _frames_changed(victim, draw)
        case 2:
            remove(victim)
            what, at = "missing", 0
        case 3:
            what, at = replace_by_folder(victim, draw), 0
        case _:
            other = draw.choice([path for path in segments if path != victim])
            exchange(victim, other)
            version = max(
                (int(path.parent.name) for path in (folder / "checkpoints").glob("*/manifest.json")), default=0
            )
            return Damage("journal", f"{victim.name} and {other.name} exchanged", Allowed(version, all_samples=False))
    return Damage("journal", f"{victim.name}: {what} at {at}", _left(folder, truth, undamaged, segments, victim, at))


def _beside_segments(root: Path, segments: Sequence[Path], draw: random.Random) -> str:
    name = draw.choice(
        ("000099.log", "x.log", "000004.log.part", "000003.log~", "99", ".000001.log", "-1.log", "²³.log")
    )
    if draw.random() < 0.5:
        (root / name).mkdir()
        return f"a folder named {name}"
    (root / name).write_bytes(draw.choice((b"", draw.randbytes(100), *GARBAGE)))
    return f"a file of garbage named {name}"


def _frames_changed(victim: Path, draw: random.Random) -> tuple[str, int]:
    parts = frames(victim.read_bytes())
    first = int(parts[0].startswith(PREAMBLE))
    i = draw.randrange(first, len(parts))
    at = sum(map(len, parts[:i]))
    match draw.randrange(4):
        case 0:
            what, at, changed = f"frame {i + 1} twice", at + len(parts[i]), [*parts[: i + 1], *parts[i:]]
        case 1:
            what, changed = f"frame {i + 1} missing", [*parts[:i], *parts[i + 1 :]]
        case 2:
            j = min(i + 1, len(parts) - 1)
            what, changed = f"frames {i + 1} and {j + 1} exchanged", list(parts)
            changed[i], changed[j] = changed[j], changed[i]
        case _:
            j = draw.randrange(first, len(parts))
            what, changed = f"frame {i + 1} once more before frame {j + 1}", list(parts)
            changed.insert(j, parts[i])
            at = sum(map(len, parts[:j]))
    victim.write_bytes(b"".join(changed))
    return what, at


def _left(folder: Path, truth: Truth, undamaged: Resumed, segments: Sequence[Path], victim: Path, at: int) -> Allowed:
    """What can still be had where a segment is as it was up to byte `at` only."""
    version = _reached(folder, truth, undamaged, segments, victim, at)
    if victim != segments[-1]:
        return Allowed(version, all_samples=version == truth.newest)
    silent = not victim.exists() or victim.is_file() and victim.stat().st_size <= at and _whole(victim.read_bytes())
    if len(segments) == 1:
        return Allowed(version, all_samples=False, silent=silent)
    ended = {tuple(fact.about) for fact in truth.facts if fact.what == "done" and not fact.behind(victim.name, at)}
    return Allowed(version, all_samples=False, samples=frozenset(ended & set(undamaged.samples)), silent=silent)


def _whole(content: bytes) -> bool:
    try:
        return b"".join(frames(content)) == content
    except struct.error:
        return False


def _reached(folder: Path, truth: Truth, undamaged: Resumed, segments: Sequence[Path], victim: Path, at: int) -> int:
    # A step that was killed before its manifest is proved by the journal alone.
    steps = [int(path.parent.name) for path in (folder / "checkpoints").glob("*/manifest.json")]
    lost = truth.published_behind(victim.name, at)
    if victim == segments[-1]:
        return max([*steps, 0, *(truth.newest,) * (not lost), *(v - 1 for v in lost[:1])])
    start = max((step for step in steps if step <= min(undamaged.remade, default=truth.newest)), default=0)
    return max(steps, default=0) if any(version > start for version in lost) else truth.newest


# ---------------------------------------------------------------- the rest


def metrics(folder: Path, truth: Truth, undamaged: Resumed, draw: random.Random) -> Damage:
    what = _of_lines(folder / "metrics.jsonl", draw)
    return Damage("metrics", f"metrics.jsonl: {what}", Allowed(truth.newest, all_samples=True))


def rest(folder: Path, truth: Truth, undamaged: Resumed, draw: random.Random) -> Damage:
    files = sorted(path for pattern in REST for path in folder.glob(pattern) if path.is_file())
    path = draw.choice(files)
    name = str(path.relative_to(folder))
    refusal = name == "config.json"  # the only file that says which run this is
    roll = draw.random()
    if roll < 0.1:
        remove(path)
        what = "missing"
    elif roll < 0.2:
        what = replace_by_folder(path, draw)
    elif roll < 0.3:
        other = draw.choice([each for each in files if each != path])
        exchange(path, other)
        what = f"exchanged with {other.relative_to(folder)}"
        refusal |= other.name == "config.json"
    elif roll < 0.4:
        extra = folder / draw.choice(
            ("extra", "weights", "evaluations", "hf", "wanted_instances", "base.json", "99.json")
        )
        if extra.exists():
            what = _of_lines(path, draw) if path.suffix == ".jsonl" else edit(path, draw)[0]
        elif draw.random() < 0.5:
            extra.mkdir()
            what, name = "an extra folder", extra.name
        else:
            extra.write_bytes(draw.choice(GARBAGE))
            what, name = "an extra file", extra.name
    elif path.suffix == ".jsonl":
        what = _of_lines(path, draw)
    elif path.suffix == ".json" and draw.random() < 0.4:
        what = _other_json(path, draw)
    else:
        what = edit(path, draw)[0]
    return Damage("rest", f"{name}: {what}", Allowed(truth.newest, all_samples=True, refusal=refusal))


def _of_lines(path: Path, draw: random.Random) -> str:
    lines = path.read_bytes().splitlines(keepends=True)
    if not lines:
        return edit(path, draw)[0]
    at = draw.randrange(len(lines))
    match draw.choices(range(7), (8, 3, 1, 1, 2, 1, 1))[0]:
        case 0:
            return edit(path, draw, (*EDITS, garbage_tail))[0]
        case 1:
            garbage = draw.choice(GARBAGE)
            what = f"line {garbage[:20]!r} before line {at + 1}"
            lines.insert(at, garbage + b"\n")
        case 2:
            what = f"line {at + 1} twice"
            lines.insert(at, lines[at])
        case 3:
            what = f"line {at + 1} missing"
            del lines[at]
        case 4:
            row = json.loads(lines[at])
            key = "step" if "step" in row and draw.random() < 0.6 else draw.choice(sorted(row))
            row[key] = draw.choice((None, "x", [], {}, True, -1, 1.5, 10**400, {"a": [1]}, "9" * 5000))
            what = f"{key} of line {at + 1} is {str(row[key])[:20]!r}"
            lines[at] = json.dumps(row).encode() + b"\n"
        case 5:
            remove(path)
            return "missing"
        case _:
            return replace_by_folder(path, draw)
    path.write_bytes(b"".join(lines))
    return what


def _other_json(path: Path, draw: random.Random) -> str:
    """Valid JSON that is not what the run writes."""
    try:
        tree = json.loads(path.read_bytes())
    except ValueError:  # a trace that is still being written
        return edit(path, draw)[0]
    if not isinstance(tree, dict) or not tree or draw.random() < 0.3:
        garbage = draw.choice(GARBAGE)
        path.write_bytes(garbage)
        return f"is {garbage[:20]!r}"
    key = draw.choice(sorted(tree))
    tree[key] = draw.choice((None, "x", [], {}, True, -1, 1.5, {"a": [1]}))
    path.write_text(json.dumps(tree))
    return f"{key} is {tree[key]!r}"


def stale(folder: Path, older: Path, truth: Truth, undamaged: Resumed, draw: random.Random) -> Damage:
    """Files as they were when the workdir was copied to `older`, among those of today: a snapshot that was not of one
    moment, or a restore that ended half way."""
    root, what = folder / "checkpoints", []
    if draw.random() < 0.5:
        for step in [path for path in root.iterdir() if not (older / "checkpoints" / path.name).exists()]:
            remove(step)
            what.append(f"checkpoint {step.name} missing")
    good = any(path.name == "manifest.json" for path in root.glob("*/manifest.json"))
    allowed = Allowed(truth.newest, all_samples=good, refusal=not good)
    segments = sorted(path for path in (folder / "journal").glob("*.log") if path.is_file())
    if not what or draw.random() < 0.5:
        victim = segments[-1] if draw.random() < 0.6 else draw.choice(segments)
        before = older / "journal" / victim.name
        at = before.stat().st_size if before.exists() else 0
        if at:
            victim.write_bytes(before.read_bytes())
        else:
            remove(victim)
        what.append(f"{victim.name} as of {at} bytes")
        left = _left(folder, truth, undamaged, segments, victim, at)
        allowed = dataclasses.replace(left, refusal=not good)
    if draw.random() < 0.3 and (metrics := older / "metrics.jsonl").exists():
        shutil.copy(metrics, folder / metrics.name)
        what.append("metrics.jsonl as it was")
    return Damage("stale", "; ".join(what), allowed)


def kind_of(damage: Damage) -> str:
    """One word for what was done."""
    for word, signs in KINDS.items():
        if any(sign in damage.what for sign in signs):
            return word
    return "other"


KINDS = {
    "flip": ("flipped",),
    "short": ("truncated", "empty"),
    "zeros": ("zeros",),
    "swapped": ("exchanged", "once more", "twice"),
    "extra": ("extra", "folder", "file", "copy of", "behind its end", "before line", "a byte where"),
    "missing": ("missing", "gone"),
    "changed": (" is ",),
    "manifest": ("manifest",),
}

SUBJECTS: dict[str, tuple[int, Callable[[Path, Truth, Resumed, random.Random], Damage]]] = {
    "checkpoint": (7, checkpoint),
    "journal": (6, journal),
    "metrics": (2, metrics),
    "rest": (3, rest),
}
