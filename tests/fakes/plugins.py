"""What a user's own module may bring, each by its import path: objectives, metric sinks, a model family, a source of
prompts, a launcher."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.models.families.family import DEFAULTS, GQA, NORMS, Family, Tensor
from dora_jax.runtime.cluster.launch_process import ProcessLauncher
from dora_jax.tasks.source import TaskRow, uid_of


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


RENAMED = Family(  # a Llama whose fields and tensors have other names
    model_type="renamed",
    architecture="RenamedForCausalLM",
    defaults=DEFAULTS,
    names={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    tensors={
        **{name: dataclasses.replace(tensor, name=f"block.{tensor.name}") for name, tensor in (NORMS | GQA).items()},
        "gate_proj": Tensor("ffn.w1.weight"),
        "up_proj": Tensor("ffn.w3.weight"),
        "down_proj": Tensor("ffn.w2.weight"),
    },
)
SHIPPED = dataclasses.replace(RENAMED, model_type="llama")


class Doubles:
    """A source: "7 + 7 =" for numbers from `start` on; the first so many are held out."""

    name = "doubles"

    def __init__(self, *, heldout, exclude, start=0):
        self._start, self._exclude = start + heldout, exclude
        self.heldout = [self._row(start + i) for i in range(heldout)]
        self.heldout_uids = frozenset(row.uid for row in self.heldout)

    def draw(self, stream, seed, i):
        return self._row(self._start + i)

    def exclude(self, uids):
        self._exclude |= uids

    def _row(self, i):
        question = f"{i} + {i} ="
        return TaskRow(uid=uid_of(question), task="doubles", question=question, answer=str(2 * i), solution=str(2 * i))


class Half:
    """No source: it draws nothing."""

    name, heldout, heldout_uids = "half", (), frozenset()

    def __init__(self, *, heldout, exclude):
        pass


class Announced(ProcessLauncher):
    """Child processes, each written down in WORKDIR/started.txt."""

    def __init__(self, workdir, run):
        super().__init__(workdir, run)
        self._started = workdir / "started.txt"

    def start(self, ticket, hosts, slice_type):
        with self._started.open("a") as file:
            print(ticket.gang, hosts, file=file)
        return super().start(ticket, hosts, slice_type)
