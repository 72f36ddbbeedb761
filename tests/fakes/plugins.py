"""What a user's own module may bring: objectives and a metric sink, each by its import path."""

import json

import jax
import jax.numpy as jnp
import numpy as np


def aipo(logprobs, anchor, advantages, *, behavior, rho=2.0):
    """-sg(min(pi / mu, rho)) A log pi (LlamaRL, arXiv 2505.24034)."""
    weight = jnp.minimum(jnp.exp(jax.lax.stop_gradient(logprobs) - behavior), rho)
    return -weight * advantages * logprobs


def centred(rewards, group_ids, *, lengths):
    """R - mean_g, of samples that say anything."""
    means = {g: rewards[group_ids == g].mean() for g in np.unique(group_ids)}
    return np.where(lengths > 0, rewards - np.array([means[g] for g in group_ids]), 0.0)


def near(gap, mask, segment_ids, *, most=3.0):
    """Drops tokens on which engine and trainer differ by more than `most`."""
    return jnp.ones_like(gap), mask & (jnp.abs(gap) < most), {}


def wrong(rewards):
    return rewards


def flat(rewards, group_ids):
    return np.zeros(3)


class Lines:
    """Writes each record as a line of WORKDIR/own.jsonl."""

    def __init__(self, config, workdir):
        self._file = (workdir / "own.jsonl").open("a")

    def write(self, step, scalars):
        print(json.dumps({"step": step, **scalars}), file=self._file)

    def status(self, facts):
        pass

    def close(self):
        self._file.close()


class Reads(Lines):
    """Writes samples too."""

    def samples(self, step, kind, rows):
        print(json.dumps({"step": step, "kind": kind, "rows": rows}), file=self._file)


class Raises(Lines):
    def write(self, step, scalars):
        raise OSError("no room")


class Writes:
    """No sink: it has one method of three."""

    def __init__(self, config, workdir):
        pass

    def write(self, step, scalars):
        pass
