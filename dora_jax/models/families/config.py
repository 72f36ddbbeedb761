"""Sizes and switches of the decoder, and what a mesh may do with them. Standard library only.

Consumes nothing but numbers; produces `ModelConfig`, which decoder.py, sharding.py and hf.py read. It imports no JAX,
so that a wrong model or an indivisible mesh is reported before JAX is imported. families/ says which switches a
`model_type` sets, and new_config there makes the config of a fresh model.
"""

from __future__ import annotations

import dataclasses
import functools
import math

MAX_LAYERS = 10_000  # ten times what any model has; the names of a billion layers' tensors take all memory
ROUTERS = ("softmax", "sigmoid")
NORMS = ("pre", "post", "both")  # where a layer's norms stand: before its two parts, behind them, or both
ACTIVATIONS = ("silu", "gelu_tanh", "clamped")
SMALL = 2  # times a layer's input: results of an attention kernel that are no wider are kept for the backward pass
EXPERT_SLACK = 1.25  # rows of a block of grouped_experts.py, times those of an even load


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """Frequency scaling by YaRN, arXiv 2309.00071 (`rope_type: yarn`): Qwen, DeepSeek."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0  # 0: not given
    mscale_all_dim: float = 0.0  # 0: not given
    attention_factor: float = 0.0  # 0: follows from the fields above
    truncate: bool = True  # whether the ramp's ends are whole dimensions

    @property
    def rotary_gain(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._gain(self.mscale) / self._gain(self.mscale_all_dim)
        return self._gain(1.0)

    @property
    def score_gain(self) -> float:
        """What latent attention multiplies its scores by."""
        return self._gain(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _gain(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """Positions divided by a factor (`rope_type: linear`)."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proportional:
    """Only the first of a head's angles turn, at the frequencies that they have among all (`rope_type:
    proportional`)."""

    share: float
    factor: float = 1.0  # positions are divided by it


@dataclasses.dataclass(frozen=True)
class Scores:
    """How one attention makes scores of queries and keys."""

    scale: float  # their products are multiplied by it, in f32
    window: int = 0  # positions that a query sees, its own the last; 0: all up to its own
    row: int = 0  # which of ModelConfig.kv_rows its keys and values have


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What a layer is where layers differ."""

    window: int = 0  # see Scores
    theta: float = 0.0  # base of its rotary angles, which are not scaled then; 0: the model's own
    rotated: bool = True  # whether queries and keys are
    head_dim: int = 0  # of queries and keys; 0: the model's
    kv_heads: int = 0  # 0: the model's
    tied_values: bool = False  # values are its keys, before their norm and their rotation
    kv: str = "own"  # shared: the layers that "read", behind all others, take its keys and values, by their window
    d_ff: int = 0  # of its dense feed-forward; 0: the model's
    linear: bool = False  # linear attention by ModelConfig.delta: a recurrent state, and no keys and values

    @property
    def shape(self) -> tuple[int, int, bool, bool, int, bool]:
        """Layers of one shape have the same matrices."""
        return self.head_dim, self.kv_heads, self.tied_values, self.kv == "read", self.d_ff, self.linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """Linear attention by the gated delta rule (arXiv 2412.06464): each value head has a state, a matrix of f32."""

    key_heads: int  # of queries and keys
    value_heads: int  # which are states; each key head serves as many consecutive ones
    key_dim: int
    value_dim: int
    taps: int = 4  # positions that the causal convolution of queries, keys and values sees, its own the last

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers that a token leaves in queries, keys and values."""
        key = self.key_heads * self.key_dim
        return key, key, self.value_heads * self.value_dim

    @property
    def state_numbers(self) -> int:
        """Numbers of the states of one layer."""
        return self.value_heads * self.key_dim * self.value_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (MLA): keys and values of all heads follow from one latent vector a token."""

    kv_rank: int  # numbers of the latent vector
    rope_dim: int  # numbers of the rotated key that all heads share
    nope_dim: int  # of a head's query and key that are not rotated
    v_dim: int  # of a head's value
    q_rank: int = 0  # 0: queries come from one matrix
    scaled: bool = False  # LongCat: queries times sqrt(d_model / q_rank), latents times sqrt(d_model / kv_rank)

    @property
    def cache_dim(self) -> int:
        """Numbers that a token leaves in a cache of latents."""
        return self.kv_rank + self.rope_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture-of-experts feed-forward and its router; see models/moe.py for the rules."""

    count: int  # that compute
    per_token: int  # that the router picks of count + zero
    width: int  # of one expert
    zero: int = 0  # that return their input
    shared: int = 0  # that every token takes besides; they are computed as one expert of shared x width
    first_dense: int = 0  # layers before the first that has experts
    dense: tuple[int, ...] = ()  # numbers of further layers that have none, in their order
    router: str = "softmax"  # softmax or sigmoid: what makes scores of logits
    corrected: bool = False  # whether a bias takes part in the selection
    groups: int = 1  # of experts, of which top_groups take part in the selection
    top_groups: int = 1
    renormalize: bool = True  # whether the weights of a token's experts are divided by their sum
    scale: float = 1.0  # what the weights are multiplied by
    # Gemma 4: beside the layer's dense feed-forward, each between norms of its own; the router norms the residual
    # stream itself, and has a gain for each expert's weight
    beside: bool = False
    biased: bool = False  # gpt-oss: the router has a bias, which counts in choice and weights, and so have experts
    shared_gate: bool = False  # what the shared experts give is multiplied by the sigmoid of a score of its own

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "width", "groups", "top_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"model experts.{name} is {getattr(self, name)}; it must be at least 1")
        if self.per_token > self.choices:
            raise ValueError(
                f"model experts.per_token {self.per_token} is more than the {self.choices} experts there are"
            )
        if self.count % self.groups or self.top_groups > self.groups:
            raise ValueError(
                f"model experts.count {self.count} does not fall into {self.groups} groups, of which {self.top_groups} "
                "count"
            )
        if self.groups > 1 and (self.zero or self.top_groups * self.count // self.groups < self.per_token):
            raise ValueError(
                f"model experts.top_groups {self.top_groups} hold fewer experts than per_token {self.per_token}"
            )
        if self.router not in ROUTERS:
            raise ValueError(f"model experts.router {self.router!r} is unknown; known: {', '.join(ROUTERS)}")

    @property
    def choices(self) -> int:
        """What the router chooses from."""
        return self.count + self.zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    family: str  # model_type of config.json: see families/
    vocab_size: int  # rows of the embedding; a tokenizer may be smaller
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int  # of queries and keys
    d_ff: int  # of the dense feed-forward
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | Yarn | Linear | Proportional | None = None
    rope_part: float = 1.0  # of a head, from its first number on, is rotated
    kinds: tuple[Kind, ...] = (Kind(),)  # of consecutive layers, again and again
    qk_norm: bool
    qk_norm_whole: bool = False  # queries are normed over all heads at once, and keys
    v_norm: bool = False  # values are normed too, without a gain
    qkv_bias: bool
    o_bias: bool = False
    sinks: bool = False  # each head has a learned score beside those of its keys, whose share of the weights is lost
    query_scale: float = 0.0  # queries are divided by its root; 0: by that of head_dim
    norms: str = "pre"
    gain_offset: float = 0.0  # is added to every gain
    activation: str = "silu"
    embed_scale: float = 1.0  # of what the embedding gives, rounded to its type
    per_layer: int = 0  # numbers that a second embedding has for each layer
    layer_scale: bool = False  # what a layer gives is multiplied by a number of its own, which is not trained
    logit_cap: float = 0.0  # logits z are this times tanh(z / this); 0: they are not capped
    tie_embeddings: bool = True
    norm_eps: float = 1e-6
    max_position: int = 32768
    latent: Latent | None = None  # None: grouped-query attention
    delta: Delta | None = None  # of the kinds that are linear
    gated: bool = False  # what attention gives is multiplied by the sigmoid of a gate, number by number
    experts: Experts | None = None  # None: every feed-forward is dense
    # LongCat: a layer is two sublayers of attention and dense feed-forward beside one of experts
    shortcut: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"model {name} is {getattr(self, name)}; it must be at least 1")
        if self.n_layers > MAX_LAYERS:
            raise ValueError(f"model n_layers is {self.n_layers}; it must be at most {MAX_LAYERS}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"model n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        for kind in self.kinds:
            if self.n_heads % self.kv_heads(kind):
                raise ValueError(f"model n_heads {self.n_heads} is not a multiple of {self.kv_heads(kind)} KV heads")
            if self.rope_dim(kind) % 2:
                name = "rope_dim" if self.latent else "head_dim"
                raise ValueError(f"model {name} {self.rope_dim(kind)} is odd; rotary embeddings need pairs")
        own, every = self.kv_owners, self.every_kind
        shared = {kind.window: self.kv_row(kind) for kind in every[:own] if kind.kv == "shared"}
        if len(shared) != sum(kind.kv == "shared" for kind in every) or any(
            kind.kv != "read" or shared.get(kind.window) != self.kv_row(kind) for kind in every[own:]
        ):
            raise ValueError(
                f"model n_layers {self.n_layers}: the last {self.n_layers - own} read keys and values, and not each of "
                "their windows has one earlier layer that shares them, in rows as they read"
            )
        if self.norms not in NORMS or self.activation not in ACTIVATIONS:
            raise ValueError(f"model norms {self.norms!r} and activation {self.activation!r}: {NORMS} x {ACTIVATIONS}")
        if self.latent and (self.kinds != (Kind(),) or self.rope_part != 1.0 or self.qk_norm):
            raise ValueError("model latent: windows and heads that are normed or partly rotated are of grouped queries")
        if (linear := self.linear_layers) and (
            not (m := self.delta) or m.value_heads % m.key_heads or linear == self.n_layers or self.latent
        ):
            raise ValueError(
                f"model delta {m}: linear layers need it, value_heads that are a multiple of key_heads, and other "
                "layers, whose queries are grouped, beside them"
            )
        if self.experts and not self.expert_layers:
            raise ValueError(
                f"model n_layers {self.n_layers} leaves no layer behind experts.first_dense {self.experts.first_dense} "
                f"and experts.dense {self.experts.dense}"
            )

    @property
    def rule(self) -> Delta:
        """`delta`, of a model that has it."""
        assert self.delta is not None, self.family
        return self.delta

    @property
    def mla(self) -> Latent:
        """`latent`, of a model that has it."""
        assert self.latent is not None, self.family
        return self.latent

    @property
    def moe(self) -> Experts:
        """`experts`, of a model that has them."""
        assert self.experts is not None, self.family
        return self.experts

    def dim(self, kind: Kind) -> int:
        """Numbers of a query's head, and a key's."""
        return kind.head_dim or self.head_dim

    def kv_heads(self, kind: Kind) -> int:
        return kind.kv_heads or self.n_kv_heads

    def rope_dim(self, kind: Kind) -> int:
        """Numbers of a head that are rotated."""
        return self.latent.rope_dim if self.latent else int(self.dim(kind) * self.rope_part)

    def kind(self, layer: int) -> Kind:
        return self.kinds[layer % len(self.kinds)]

    @property
    def every_kind(self) -> tuple[Kind, ...]:
        """The kind of each layer."""
        return tuple(map(self.kind, range(self.n_layers)))

    @property
    def repeat(self) -> int:
        """Layers of one repeat of the first ones: what a scan's step computes."""
        return repeats(tuple((kind, self.has_experts(i)) for i, kind in enumerate(self.every_kind)))[0]

    @property
    def kv_owners(self) -> int:
        """The first so many layers have keys and values of their own."""
        return next((i for i, kind in enumerate(self.every_kind) if kind.kv == "read"), self.n_layers)

    def source(self, kind: Kind) -> int:
        """The layer whose keys and values one that reads attends to."""
        return next(i for i, one in enumerate(self.every_kind) if one.kv == "shared" and one.window == kind.window)

    @property
    def kv_rows(self) -> tuple[tuple[int, int], ...]:
        """(heads, numbers of a head) of the rows of keys, as the layers have them, the first layer's first."""
        return tuple(
            dict.fromkeys((self.kv_heads(kind), self.dim(kind)) for kind in self.every_kind if not kind.linear)
        )

    def kv_row(self, kind: Kind) -> int:
        return self.kv_rows.index((self.kv_heads(kind), self.dim(kind)))

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer that has one."""
        return tuple(window for i in range(self.n_layers) if (window := self.kind(i).window))

    @property
    def local_window(self) -> int:
        """The longest window, where some layers have one and others attend in full; else 0."""
        return max(self.windows) if 0 < len(self.windows) < self.n_layers else 0

    @property
    def sublayers(self) -> int:
        """Attentions of a layer: LongCat has two."""
        return 2 if self.shortcut else 1

    @property
    def kv_layers(self) -> int:
        """Attentions that keep keys and values."""
        return (self.kv_owners - self.linear_layers) * self.sublayers

    @property
    def linear_layers(self) -> int:
        """Layers that keep a recurrent state in their place."""
        return sum(kind.linear for kind in self.every_kind)

    @property
    def places(self) -> tuple[int, ...]:
        """The number of each layer among those that keep the same: keys and values, or a state."""
        linear = [kind.linear for kind in self.every_kind]
        return tuple(linear[:i].count(own) for i, own in enumerate(linear))

    def state_bytes_on(self, tensor: int, size: int) -> float:
        """Bytes of the recurrent state of one sample on one of `tensor` devices, in a model whose numbers take `size`:
        matrices in f32, and what the convolutions see next."""
        if not (m := self.delta):
            return 0.0
        return self.linear_layers * (4 * m.state_numbers + size * (m.taps - 1) * sum(m.widths)) / tensor

    @property
    def cache_heads(self) -> int:
        """Heads whose keys and values each cache keeps, at least: of latent attention one row, which all heads
        share."""
        return 1 if self.latent else min(heads for heads, _ in self.kv_rows)

    def cache_numbers_on(self, tensor: int, windows: bool | None = None) -> int:
        """Numbers that a token leaves in the caches of all attentions on one of `tensor` devices, at least one whole
        head each; windows: in those of layers with one, or of those without."""
        if self.latent:
            return self.kv_layers * self.latent.cache_dim
        kinds = [x for x in self.every_kind[: self.kv_owners] if windows is None or bool(x.window) == windows]
        kinds = [x for x in kinds if not x.linear]
        return sum(2 * self.kv_heads(x) // min(tensor, self.cache_heads) * self.dim(x) for x in kinds)

    @property
    def expert_layers(self) -> int:
        """Layers that have a router."""
        return sum(map(self.has_experts, range(self.n_layers)))

    def has_experts(self, layer: int) -> bool:
        e = self.experts
        return e is not None and layer >= e.first_dense and layer not in e.dense

    def scores(self, kind: Kind) -> Scores:
        gain = self.rope_scaling.score_gain if self.latent and isinstance(self.rope_scaling, Yarn) else 1.0
        return Scores((self.query_scale or self.dim(kind)) ** -0.5 * gain, kind.window, self.kv_row(kind))

    def q_width(self, kind: Kind = Kind()) -> int:
        """Numbers that a token leaves in what a layer's attention gives."""
        return self.rule.widths[2] if kind.linear else self.n_heads * self.dim(kind)

    def kv_width(self, kind: Kind = Kind()) -> int:
        """Width of the keys, or values, that a layer makes."""
        if kind.linear:
            return sum(self.rule.widths) // 2
        return 0 if kind.kv == "read" else self.kv_heads(kind) * self.dim(kind)

    @property
    def head_widths(self) -> int:
        """Numbers that a token leaves in queries and keys of all layers."""
        return self.sublayers * sum(self.q_width(x) + self.kv_width(x) for x in self.every_kind)

    def attention_params(self, kind: Kind) -> int:
        """Parameters of one attention's matrices."""
        if kind.linear:  # with the convolution, the gate and the two scores of each head
            width, heads = sum(self.rule.widths), self.rule.value_heads
            return self.d_model * (width + 2 * self.rule.widths[2] + 2 * heads) + self.rule.taps * width
        if self.latent is None:
            queries = (3 if self.gated else 2) * self.q_width(kind)
            return self.d_model * (queries + (1 if kind.tied_values else 2) * self.kv_width(kind))
        m, d, heads = self.latent, self.d_model, self.n_heads
        query = m.q_rank * (d + self.q_width()) if m.q_rank else d * self.q_width()
        return query + d * m.cache_dim + m.kv_rank * heads * (m.nope_dim + m.v_dim) + heads * m.v_dim * d

    @property
    def expert_layer_params(self) -> int:
        """Parameters of the experts of one layer: what an `expert` axis cuts."""
        return 3 * self.d_model * self.experts.width * self.experts.count if self.experts else 0

    @property
    def ff_width(self) -> int:
        """Numbers that a token leaves inside the feed-forwards of one layer, on average of those that are alike but
        for their width."""
        if self.experts is None:
            return sum(kind.d_ff or self.d_ff for kind in self.every_kind) // self.n_layers
        mixture = self.experts.width * (self.experts.per_token + self.experts.shared)
        return mixture + self.d_ff * (2 if self.shortcut else self.experts.beside)

    @property
    def matrix_params(self) -> int:
        """Parameters of all matrices: what a mesh cuts."""
        return self._all_params(active=False)

    @property
    def active_params(self) -> int:
        """Parameters of the matrices that one token is multiplied with: of experts, those that it is sent to."""
        return self._all_params(active=True)

    @property
    def gain_params(self) -> int:
        """Gains, biases and numbers of a layer: small, and replicated but for the biases."""
        d, e, sublayers = self.d_model, self.experts, 2 if self.shortcut else 1
        total = d + self.per_layer + self.n_layers * ((d if self.per_layer else 0) + self.layer_scale)
        for kind in self.every_kind:
            q, kv, dim = self.q_width(kind), self.kv_width(kind), self.dim(kind)
            if kind.linear:
                total += 2 * self.rule.value_heads + self.rule.value_dim + 2 * d
                continue
            attention = (q + kv if self.qk_norm_whole else dim * (1 + (kv > 0))) if self.qk_norm else 0
            attention += q + 2 * kv if self.qkv_bias else 0
            attention += d * self.o_bias + self.n_heads * self.sinks
            attention += self.latent.q_rank + self.latent.kv_rank if self.latent else 0
            total += sublayers * (attention + 2 * d * (2 if self.norms == "both" else 1))
        if e and e.beside:
            total += self.expert_layers * (4 * d + e.choices)
        if e and e.biased:
            total += self.expert_layers * (e.count * (2 * e.width + d) + e.choices)
        return total + (self.expert_layers * e.choices if e and e.corrected else 0)

    @property
    def wide_params(self) -> int:
        """Parameters that every copy keeps in f32: gains, and the routers with their biases."""
        e, routers = self.experts, 0
        if e is not None:
            routers = self.expert_layers * self.d_model * (e.choices + e.shared_gate)
        return self.gain_params + routers - self.n_layers * self.layer_scale

    @property
    def end_params(self) -> int:
        """Parameters of the matrices before and behind the layers."""
        second = self.n_layers * self.per_layer * (self.vocab_size + self.d_model)
        return (1 if self.tie_embeddings else 2) * self.vocab_size * self.d_model + second

    def _all_params(self, active: bool) -> int:
        return sum(self.layer_params(i, active) for i in range(self.n_layers)) + self.end_params

    def layer_params(self, layer: int | None = None, active: bool = False) -> int:
        """Parameters of one layer's matrices: on average of the layers that have experts, or of all if none has;
        active: of those that one token is multiplied with."""
        e, d, sublayers = self.experts, self.d_model, 2 if self.shortcut else 1
        if layer is None:
            alike = [i for i in range(self.n_layers) if e is None or self.has_experts(i)]
            return sum(self.layer_params(i, active) for i in alike) // len(alike)
        kind = self.kind(layer)
        attention, dense = self.attention_params(kind) + 2 * d * self.per_layer, 3 * d * (kind.d_ff or self.d_ff)
        if e is None or not self.has_experts(layer):
            return sublayers * (attention + dense)
        count = e.per_token * e.count / e.choices if active else e.count  # a zero expert multiplies nothing
        mixture = round(3 * d * e.width * (count + e.shared)) + d * (e.choices + e.shared_gate)
        return sublayers * attention + mixture + (sublayers * dense if self.shortcut or e.beside else 0)


@functools.cache
def repeats(layers: tuple[object, ...]) -> tuple[int, int]:
    """(layers of a repeat, how often it stands) at the beginning: of all repeats, those that cover most."""
    best = 1, 1
    for length in range(1, len(layers) // 2 + 1):
        times = 1
        while layers[times * length :][:length] == layers[:length]:
            times += 1
        if times > 1 and times * length > math.prod(best):
            best = length, times
    return best


def check_mesh(cfg: ModelConfig, *, fsdp: int, tensor: int, expert: int = 1, serving: bool = False) -> None:
    """ValueError naming the first size that a mesh axis does not divide. Mirrors the tables in sharding.py.

    serving: of an engine, several of whose devices may hold the same KV head; its axis `expert` is `tensor` or 1.
    """
    e = cfg.experts
    if expert > 1 and e is None:
        raise ValueError(f"mesh axis expert={expert} needs a model with experts, and {cfg.family} here has none")
    cut = 1 if serving else fsdp * expert
    sizes = [("fsdp", cut, "d_model", cfg.d_model)]
    sizes += [("tensor", tensor, "n_heads", cfg.n_heads)]
    sizes += [("tensor", tensor, "n_kv_heads", heads) for heads, _ in cfg.kv_rows]
    sizes += [("tensor", tensor, name, getattr(cfg, name)) for name in ("d_ff", "vocab_size")]
    sizes += [("fsdp", cut, "n_layers x per_layer", cfg.n_layers * cfg.per_layer)]
    if e is not None:
        sizes += [("expert", expert, "experts.count", e.count)]
        sizes += [("tensor", tensor, "experts.width", e.width)] if expert == 1 or not serving else []
    if cfg.delta is not None:
        sizes += [
            ("tensor", tensor, f"delta.{name}", getattr(cfg.delta, name)) for name in ("key_heads", "value_heads")
        ]
    if cfg.latent is not None:
        ranks = [("latent.kv_rank", cfg.latent.kv_rank), ("latent.q_rank", cfg.latent.q_rank)]
        sizes += [("fsdp", cut, name, rank) for name, rank in ranks]
    for axis, size, name, value in sizes:
        alike = len({heads for heads, _ in cfg.kv_rows}) == 1  # else a device's queries are not of all its heads
        shared = serving and name == "n_kv_heads" and size % value == 0 and alike
        if value % size and not shared:
            axis += " x expert" if axis == "fsdp" and expert > 1 else ""
            raise ValueError(f"model {name} {value} is not divisible by mesh axis {axis}={size}")
