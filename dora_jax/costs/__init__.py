"""How long things take on a chip: a roofline from its table, or costs that were measured.

Consumes counts (batch, context, tokens, chips), produces seconds. Both kinds answer the same questions:

    decode_base_s(batch)        one tick, without reading the KV
    decode_kv_s                 more of it, for each token of context in the batch, in layers that attend in full
    window_kv_s                 the same in layers with a window, for each of a sample's last `window` tokens
    prefill_s(tokens, past)     `tokens` new ones behind `past` cached ones
    train_s(samples, tokens, squares)   one step; squares = sum of squared sequence lengths
    load_s(peers), move_s(tokens), park_s(tokens)   one transfer of weights, or of the KV of one sample
    kv_bytes(tokens)                    what one transfer of a sample's KV takes along
    lend_s(), return_s(*tokens)         the trainer's chips become an instance, and the trainer's again

A file of measured costs is JSON: {"decode": [[batch, seconds], ...], "decode_kv_s": s, "prefill_fixed_s": s,
"prefill_s_per_token": s, "train_fixed_s": s, "train_s_per_token": s, "load_s": s, "move_fixed_s": s,
"move_s_per_token": s, "score_s": s, "pages": n, "contention": x}. Between two batches a tick is interpolated.
A file may name "lend_s" and "return_s"; they are 0 where they are left out, as on devices that hold the memory of both
sides. contention: an instance takes so many times as long while the trainer works; above 1 where both share a machine,
and 1 where it is left out.

Sources: the roofline of a transformer's decode as in arXiv 2211.05102; matmuls read the weights once a tick or are
bound by FLOPs, attention is bound by the KV it reads, and the two follow one another.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from dora_jax.base.chips import CHIPS, ici_bytes_per_s
from dora_jax.base.config_tree import field
from dora_jax.config import ConfigError
from dora_jax.models import families
from dora_jax.models.families.config import ModelConfig

FORWARD, BACKWARD = 2, 4  # FLOPs a parameter and token
LAYER_OVERHEAD_S = 46e-6  # of a decode step: a layer's small operations, by XLA's estimates for 8B on v5p


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    size: str = field("", "a known model, such as DeepSeek-V3, whose numbers take the place of the following")
    params: float = field(32.8e9, "all weights")
    active_params: float = field(0.0, "used by one token; 0: all of them (dense)")
    experts: int = field(0, "routed experts a layer; 0: dense")
    experts_per_token: int = 0
    n_layers: int = 64
    d_model: int = 5120
    n_heads: int = 40
    head_dim: int = 128
    kv_bytes_per_token: float = field(262144.0, "all layers")
    window: int = field(0, "tokens that some layers see at most; 0: all layers attend in full")
    window_share: float = field(0.0, "of kv_bytes_per_token, what the layers with a window have", ge=0.0, le=1.0)
    state_bytes: float = field(0.0, "of a sample beside it: the states of layers of linear attention", ge=0.0)
    kv_copies: float = field(1.0, "chips of an instance that hold the same keys and values, or latents")
    weight_bytes_per_param: float = 2.0
    adapter_bytes: float = field(
        0.0, "of a version that is an adapter of one base, served by one call; 0: full weights"
    )


@dataclass(frozen=True, kw_only=True)
class Hardware:
    chip: str = "h800"
    chips: int = 64
    rollout_chips: int = field(0, "the trainer has the others; 0: colocated: both roles have all chips and take turns")
    prefill_chips: int = field(0, "of the rollout chips, in instances that only prefill; 0: each does both")
    tensor: int = field(4, "chips that split every matrix of an instance")
    expert: int = field(1, "groups of `tensor` chips that split the experts of an instance")
    residents: int = field(1, "R: versions an instance holds at once")
    slots: int = field(512, "samples that decode at once, per instance")
    hbm_share: float = field(0.9, "of HBM that weights and KV may fill")
    page_size: int = 16
    speeds: tuple[float, ...] = field((1.0,), "relative speeds of the instances, repeated")

    @property
    def instance_chips(self) -> int:
        return self.tensor * self.expert

    def speed(self, instance: int) -> float:
        return self.speeds[instance % len(self.speeds)]

    @property
    def colocated(self) -> bool:
        return self.rollout_chips == 0

    @property
    def instances(self) -> int:
        return ((self.rollout_chips or self.chips) - self.prefill_chips) // self.instance_chips

    @property
    def trainer_chips(self) -> int:
        return self.chips - self.rollout_chips

    @property
    def lendable(self) -> tuple[int, ...]:
        """Instances that the trainer's chips make up where they are lent."""
        first = self.instances
        return () if self.colocated else tuple(range(first, first + self.trainer_chips // self.instance_chips))


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    path: str = field("", "measured costs (JSON, see below) in place of the roofline")
    decode_overhead_s: float = field(0.005, "of one tick, whatever its batch")
    hbm_efficiency: float = field(0.8, "share of the chip's bandwidth that decode reaches")
    flops_efficiency: float = field(0.5, "share of the chip's FLOP/s that prefill and a full decode batch reach")
    train_utilisation: float = field(0.35, "share of the trainer's FLOP/s, preparation included")
    train_fixed_s: float = field(0.0, "of a step, however many chips")
    train_row_tokens: int = field(0, "of a sample as the trainer computes it, padding included; 0: its own")
    train_recomputed: float = field(0.0, "forward passes that the backward pass repeats (rematerialisation)")
    score_s: float = field(1.0, "from the last sample of a group to its rewards")
    link_efficiency: float = 0.7
    load_fixed_s: float = field(0.5, "of one weight transfer")
    move_fixed_s: float = field(0.02, "of one sample's migration")
    balance_s: float = field(0.0, "of a step, that instances with common versions stand still to move samples")
    publish_s: float = field(0.0, "from a step's end until its version is there to be loaded")
    control_s: float = field(0.0, "from a fact to the command that follows from it")
    state_bytes_per_param: float = field(12.0, "that leave the trainer's chips while lent: f32 weights, two moments")
    switch_fixed_s: float = field(0.5, "of lending the trainer's chips, and of returning them")


def open_costs(model: ModelSizes, hardware: Hardware, options: CostOptions) -> Costs:
    """Measured costs where the options name a file of them, a roofline otherwise; ConfigError names what is wrong."""
    return MeasuredCosts(options.path) if options.path else Roofline(model, hardware, options)


def sizes_of(asked: ModelSizes, chips: int, model: ModelConfig | None = None) -> ModelSizes:
    """The sizes of this model, or of the one that `asked.size` names, on instances of so many chips; without either
    what is asked.

    ConfigError where no model has the name.
    """
    if not asked.size and model is None:
        return asked
    if model is None and asked.size not in families.KNOWN:
        raise ConfigError(f"model.size: {asked.size!r} is none of {', '.join(families.KNOWN)}")
    model = model or families.KNOWN[asked.size]
    experts = model.experts
    numbers = model.cache_numbers_on(1)
    return dataclasses.replace(
        asked,
        params=float(model.matrix_params + model.gain_params),
        active_params=float(model.active_params + model.gain_params),
        experts=experts.choices if experts else 0,
        experts_per_token=experts.per_token if experts else 0,
        n_layers=model.n_layers,
        d_model=model.d_model,
        n_heads=model.n_heads * model.sublayers * (model.n_layers - model.linear_layers) // model.n_layers,
        head_dim=model.head_dim,
        kv_bytes_per_token=2.0 * numbers,
        window=max(model.windows, default=0),
        window_share=model.cache_numbers_on(1, True) / numbers if model.windows else 0.0,
        state_bytes=model.state_bytes_on(1, 2),
        kv_copies=chips * model.cache_numbers_on(chips) / numbers,
    )


class Roofline:
    """pages: KV pages of an instance. weight_bytes: of a version. mixes: one decode call serves rows of all
    versions."""

    contention = 1.0  # every role has chips of its own

    def __init__(self, model: ModelSizes, hardware: Hardware, cost: CostOptions):
        model = sizes_of(model, hardware.instance_chips)
        self._model, self._hardware, self._cost = model, hardware, cost
        self._chip = chip = CHIPS[hardware.chip]
        chips = hardware.instance_chips
        self._bytes_per_s = chips * chip.hbm_bytes_per_s * cost.hbm_efficiency
        self._ici_bytes_per_s = ici_bytes_per_s(hardware.chip, chips)
        self._flops_per_s = chips * chip.flops * cost.flops_efficiency
        base = model.params * model.weight_bytes_per_param
        self.mixes, self.weight_bytes = model.adapter_bytes > 0, model.adapter_bytes or base
        self._active = model.active_params or model.params
        of_windows = model.window_share if model.window else 0.0
        kv_s = model.kv_copies * model.kv_bytes_per_token / self._bytes_per_s
        self.window, self.decode_kv_s, self.window_kv_s = model.window, (1 - of_windows) * kv_s, of_windows * kv_s
        self.score_s = cost.score_s
        self._link_bytes_per_s = chips * chip.dcn_bytes_per_s * cost.link_efficiency
        self._ticks_s: dict[int, float] = {}  # of each batch that was asked for
        self._adapters = hardware.residents * model.adapter_bytes
        held = base + self._adapters if self.mixes else hardware.residents * base
        free = chips * chip.hbm_bytes * hardware.hbm_share - held - 2 * hardware.slots * model.state_bytes
        page_bytes = model.kv_copies * model.kv_bytes_per_token * hardware.page_size
        self.pages = int(free / page_bytes)
        if of_windows:  # pages behind windows are free: every slot has one window's; of prefixes nothing is known here
            held_pages = hardware.slots * (-(-model.window // hardware.page_size) + 1)
            if held_pages < self.pages:
                self.pages = int((free / page_bytes - of_windows * held_pages) / (1 - of_windows))
        if self.pages < 1:
            raise ConfigError(
                f"hardware.tensor: {held / 1e9:.0f} GB of weights ({hardware.residents} resident versions) leave no KV "
                f"cache on {chips} {hardware.chip}")  # fmt: skip

    def decode_base_s(self, batch: int) -> float:
        if batch in self._ticks_s:
            return self._ticks_s[batch]
        hardware, chip, model = self._hardware, self._chip, self._model
        size = model.weight_bytes_per_param
        states = 2 * batch * model.state_bytes  # read and written
        read = (self.touched_params(batch) * size + self._adapters + states) / self._bytes_per_s
        compute = FORWARD * (self._active + self._adapters / size) * batch / self._flops_per_s
        # Two all-reduces a layer over `tensor` chips, two all-to-alls over `expert` groups.
        activations, layer_s = batch * model.d_model * 2, 0.0
        for groups, copies in (
            (hardware.tensor, 2 * (hardware.tensor - 1) / hardware.tensor),
            (hardware.expert, model.experts_per_token / (hardware.expert * hardware.tensor)),
        ):
            if groups > 1:
                layer_s += 2 * (chip.ici_latency_s + copies * activations / self._ici_bytes_per_s)
        self._ticks_s[batch] = self._cost.decode_overhead_s + max(read, compute) + (model.n_layers * layer_s)
        return self._ticks_s[batch]

    def prefill_s(self, tokens: int, past: int = 0) -> float:
        model = self._model
        attention = 2 * FORWARD * model.n_layers * model.n_heads * model.head_dim
        seen = past + tokens / 2
        seen += model.window_share * (min(seen, model.window) - seen) if model.window else 0.0
        flops = FORWARD * self._active * tokens + attention * tokens * seen
        return flops / self._flops_per_s

    def train_s(self, samples: int, tokens: int, squares: float) -> float:
        model, hardware = self._model, self._hardware
        if row := self._cost.train_row_tokens:
            tokens, squares = samples * row, samples * float(row) ** 2
        passes = FORWARD * (1 + self._cost.train_recomputed) + BACKWARD
        attention = passes * 2 * model.n_layers * model.n_heads * model.head_dim / 2
        if model.window and samples:  # as if all samples had the mean's length
            within = min(squares, 2 * model.window * tokens)
            squares += model.window_share * (within - squares)
        flops = passes * self._active * tokens + attention * squares
        rate = hardware.trainer_chips * self._chip.flops * self._cost.train_utilisation
        return self._cost.train_fixed_s + flops / rate

    def load_s(self) -> float:
        """Weights to one instance: sharded on both sides, so every chip of it receives its part."""
        return self._cost.load_fixed_s + self.weight_bytes / self._link_bytes_per_s

    def kv_bytes(self, tokens: int) -> float:
        """Count what a sample takes along: of layers with a window, the KV of the tokens that it still holds."""
        model = self._model
        behind = max(tokens - model.window, 0) if model.window else 0
        return model.kv_bytes_per_token * (tokens - model.window_share * behind) + (tokens > 0) * model.state_bytes

    def move_s(self, tokens: int) -> float:
        return self._cost.move_fixed_s + self.kv_bytes(tokens) / self._link_bytes_per_s

    def park_s(self, tokens: int) -> float:
        host = self._hardware.instance_chips * self._chip.host_bytes_per_s
        return self._cost.move_fixed_s + self.kv_bytes(tokens) / host

    def lend_s(self) -> float:
        """The trainer's state goes to host memory, and an instance's weights come from there, over each chip's own
        link."""
        chip_bytes = self._state_bytes_per_chip + self.weight_bytes / self._hardware.instance_chips
        return self._cost.switch_fixed_s + chip_bytes / self._chip.host_bytes_per_s

    def return_s(self, *tokens: int) -> float:
        """The KV of samples of so many tokens goes to host memory, and the trainer's state comes back."""
        kv_bytes = self._model.kv_copies * sum(map(self.kv_bytes, tokens)) / self._hardware.instance_chips
        return self._cost.switch_fixed_s + (kv_bytes + self._state_bytes_per_chip) / self._chip.host_bytes_per_s

    def touched_params(self, batch: int) -> float:
        """Weights that a batch reads: of the experts only those that any of its tokens chose."""
        model = self._model
        if not model.experts:
            return model.params
        chosen = model.experts_per_token / model.experts
        dense = (self._active - model.params * chosen) / (1 - chosen)
        return dense + (model.params - dense) * (1 - (1 - chosen) ** batch)

    # ------------------------------------------------------------ private

    @property
    def _state_bytes_per_chip(self) -> float:
        return self._model.params * self._cost.state_bytes_per_param / self._hardware.trainer_chips


class MeasuredCosts:
    """Costs of a real machine, from a file."""

    window, window_kv_s = 0, 0.0  # times of ticks do not separate them

    def __init__(self, path: str):
        if not Path(path).is_file():
            raise ConfigError(f"cost.path: {path} does not exist")
        try:
            data = json.loads(Path(path).read_text())
            self._batches = [int(batch) for batch, _ in data["decode"]]
            self._ticks_s = [float(seconds) for _, seconds in data["decode"]]
            names = ("decode_kv_s", "prefill_fixed_s", "prefill_s_per_token", "train_fixed_s", "train_s_per_token",
                     "load_s", "move_fixed_s", "move_s_per_token", "score_s", "pages")  # fmt: skip
            self._data = {name: float(data[name]) for name in names}
            self.contention = float(data.get("contention", 1.0))
            self._lend_s, self._return_s = float(data.get("lend_s", 0.0)), float(data.get("return_s", 0.0))
        except (ValueError, TypeError, KeyError) as error:
            what = f"{type(error).__name__} {error}"
            raise ConfigError(f"cost.path: {path} is no file of measured costs: {what}") from error
        self.decode_kv_s, self.score_s = self._data["decode_kv_s"], self._data["score_s"]
        self.pages = int(self._data["pages"])
        self.weight_bytes = 0.0  # not known from times
        self.mixes = False

    def decode_base_s(self, batch: int) -> float:
        batches, ticks = self._batches, self._ticks_s
        # beyond the largest measured batch each more sample costs what the last ones did
        i = min(bisect.bisect_left(batches, batch), len(batches) - 1)
        if i == 0:
            return ticks[0]
        slope = (ticks[i] - ticks[i - 1]) / (batches[i] - batches[i - 1])
        return ticks[i] + slope * (batch - batches[i])

    def prefill_s(self, tokens: int, past: int = 0) -> float:
        return self._data["prefill_fixed_s"] + tokens * self._data["prefill_s_per_token"]

    def train_s(self, samples: int, tokens: int, squares: float) -> float:
        return self._data["train_fixed_s"] + tokens * self._data["train_s_per_token"]

    def load_s(self) -> float:
        return self._data["load_s"]

    def kv_bytes(self, tokens: int) -> float:
        return 0.0  # not known from times

    def move_s(self, tokens: int) -> float:
        return self._data["move_fixed_s"] + tokens * self._data["move_s_per_token"]

    park_s = move_s

    def lend_s(self) -> float:
        return self._lend_s

    def return_s(self, *tokens: int) -> float:
        return self._return_s + sum(tokens) * self._data["move_s_per_token"]


Costs = Roofline | MeasuredCosts
