"""Records that cross a stage: frozen, no behaviour, standard library only.

Letters used in shapes all over the package:
  G samples a group, P groups a step, B rows, L packed length, T prompt tokens, U sampled tokens,
  V vocabulary, S slots, N pages, K the paper's bound on staleness (lag <= max_lag = K - 1).

Words: a *version* is one immutable set of weights (0 = initial, +1 per published step), a *group* is one
prompt with its G samples, an *instance* is one replica of the rollout engine, a *step* is one trainer
iteration and publishes one version, a *tick* is one engine iteration, *lag* is staleness in versions. An *episode*
is a sample of several *turns*: an environment answers each message of the policy. A turn is a run of sampled tokens,
and the tokens between two turns are *observed*. A *branch* is a sequence that a chat template's rewriting ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

Columns = Mapping[str, Any]  # of a row: name -> what JSON can hold
NO_COLUMNS: Columns = MappingProxyType({})
Version = int
InstanceId = int
Incarnation = tuple[InstanceId, int]  # one start of an instance, counted up at each
EARLIER = -1  # stands for any incarnation under an earlier process
GroupId = int  # >= 0: the training prompt stream; < 0: held-out groups; <= SERVED: requests (see `is_served`)


class SampleId(NamedTuple):
    """The only key of results; never a slot."""

    group_id: GroupId
    index: int  # type: ignore[assignment]  # hides the method of a tuple


RENEWAL = 100_000_000  # added to the id of a group that is given up when its prompt is issued again
MAX_RENEWALS = 20  # ids stay within 31 bits


def issued_first_as(group_id: GroupId) -> GroupId:
    """Return the group's number in the prompt stream, which is that of its first issue."""
    return group_id % RENEWAL if group_id >= 0 else group_id


def cycle_of(weights: Mapping[str, int]) -> tuple[str, ...]:
    """The order in which the tasks of a mix take turns: each one `weight` times, spread evenly; () for no mix."""
    turns = [((turn + 0.5) / weight, name) for name, weight in weights.items() for turn in range(weight)]
    return tuple(name for _, name in sorted(turns))


SERVED = -(1 << 30)
WHOLE = -1  # in the place of a turn's number: all turns of an episode


def is_training(group_id: GroupId) -> bool:
    return group_id >= 0


def is_eval(group_id: GroupId) -> bool:
    """Evaluation groups live on negative ids: pinned to a version, never trained."""
    return SERVED < group_id < 0


def is_served(group_id: GroupId) -> bool:
    """A request of an endpoint is a group of one sample, pinned to a version: it is neither trained nor scored."""
    return group_id <= SERVED


MAX_BIASES = 300  # entries of a logit bias: OpenAI's limit
MAX_TOP_LOGPROBS = 20  # the most likely tokens that a request may ask for with each token: OpenAI's limit
KV_WRITERS = "write_kv", "turn_and_write_kv"  # kernels, by their names in a compiled program
OWN_SAMPLING = "own_sampling"  # the scope of what a decode call computes for rows with `Sampling` alone
SHORT_ROWS = "short_rows"  # scope of the loop over micro-batches whose rows are split


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of one sample are drawn, where that differs from the run's `rollout` section; None: as there.

    The names and meanings are those of vLLM's `SamplingParams`: penalties of presence and frequency count the response,
    that of repetition prompt and response. Log-probs are reported after temperature and before everything else."""

    temperature: float | None = None  # 0: the most likely token; its log-prob is reported at temperature 1
    top_k: int | None = None  # 0: off
    top_p: float | None = None
    min_p: float | None = None
    min_tokens: int = 0  # no stop token before so many; rollout.min_new_tokens holds besides
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    biased_ids: tuple[int, ...] = ()  # a logit bias: these tokens,
    biases: tuple[float, ...] = ()  # and what is added to the logit of each
    top_logprobs: int = 0  # the most likely tokens, so many of them, that are reported with each token
    # the response begins with these, which are scored and not drawn: a prompt whose log-probs are asked for, without
    # its first token. Noise, min_tokens and penalties take them for tokens of the prompt.
    given: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # the token that completes one of these ends the response, or its turn
    grammar: str = ""  # what the response must look like: models/grammar.py. It is drawn a token a call.

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn, or reported, otherwise than by the run's section."""
        return dataclasses.replace(self, stop=()) != Sampling()

    @property
    def reads_tokens(self) -> bool:
        """A draw depends on the tokens before it, beside the last one's KV."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return bool(self.grammar) or penalties != (0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    group_id: GroupId
    task: str
    uid: str  # hash of the content: training and held-out prompts never share one
    text: str  # what the tokenizer saw, chat template included
    token_ids: np.ndarray  # i32[T]
    answer: Any  # what the reward compares with; JSON-serialisable
    max_new_tokens: int
    turn_tokens: int = 0  # that one turn of an episode may sample; 0: the sample is one answer
    row: Columns = field(default_factory=dict)  # of the file that it comes from
    sampling: Sampling | None = None  # of a request or an evaluation; None: as the run samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Half-open range of sampled tokens that one version produced."""

    version: Version
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """What travels with a sample's tokens, one row a token that ran forward: prompt and response without the last
    token.

    A column that a run does not use is None.
    """

    routes: np.ndarray | None = None  # uint8 or uint16 [T + U - 1, M, k]: the experts of M layers; see models/routes.py
    # f32[T + U - 1]: that the next token was drawn at where its turn had its own, else 0
    temperatures: np.ndarray | None = None
    # i32[2, n]: rows of the decode calls that drew the next tokens, 0 where none did, and for how many tokens in a row
    # they are these; None: all were drawn by calls of the widest
    rungs: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """An episode's sequence up to the turn whose template rewrote earlier tokens. It is packed, and is no sample."""

    prompt_ids: np.ndarray  # i32[T]
    out_ids: np.ndarray  # i32[U]
    logprobs: np.ndarray  # f32[U], 0 where observed
    mask: np.ndarray  # bool[U], True where the policy sampled the token and no earlier branch holds it
    version: Version
    table: TokenTable = TokenTable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    id: SampleId
    prompt_ids: np.ndarray  # i32[T]
    out_ids: np.ndarray  # i32[U], the stop token included when finish == "stop"; of an episode: all its turns
    logprobs: np.ndarray  # f32[U], the engine's own, after temperature; 0 where observed
    mask: np.ndarray  # bool[U], True where the policy sampled the token (False: observed, or an earlier branch holds
    # it); a run of True is a turn
    spans: tuple[Span, ...]  # exactly one unless the mode is `partial`
    finish: str  # "stop", "length" or "error"
    table: TokenTable = TokenTable()
    branches: tuple[Branch, ...] = ()  # the episode's earlier ones, oldest first
    terms: dict[str, float] | None = None  # of the reward, as the episode's environment gave them

    @property
    def version(self) -> Version:
        return self.spans[0].version


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    group_id: GroupId
    version: Version
    samples: tuple[Sample, ...]
    rewards: np.ndarray  # f32[G]
    parts: dict[str, np.ndarray]  # name -> f32[G]; the terms whose sum, by task.reward_weights, is the reward


class Estimate(NamedTuple):
    """What an objective makes of n trajectories of T response tokens: their advantages f32[n] or [n, T], what takes
    part in the loss, and the value model's targets if any."""

    advantages: np.ndarray
    mask: np.ndarray  # bool[n, T]
    returns: np.ndarray | None = None  # f32[n, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSoFar:
    """An episode at the end of a turn, as its environment is asked about it."""

    id: SampleId
    version: Version
    tokens: np.ndarray  # i32[T + U], prompt and response
    mask: np.ndarray  # bool[U], True where the policy sampled the token
    logprobs: np.ndarray  # f32[U], 0 where observed
    room: int  # tokens that may still follow


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """An environment's answer to a message: the episode goes on with these tokens behind what it keeps."""

    id: SampleId
    token_ids: np.ndarray  # i32[n]
    keep: int | None = None  # leading tokens of prompt and response that stay; None: all. Fewer begin a new branch.
    turn_tokens: int = 0  # that the turn which follows may sample; 0: as of the prompt
    stop: tuple[str, ...] = ()  # strings that end that turn
    temperature: float | None = None  # that it is drawn at; None: the run's


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnded:
    """The environment is done with the episode."""

    id: SampleId
    terms: dict[str, float]  # of the reward, summed over the turns
    finish: str = "stop"  # "length": the episode reached a limit of turns or tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLost:
    """The environment lost the episode and cannot replay it: it begins again from its prompt."""

    id: SampleId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFailed:
    """An infrastructure error, or a deadline: the episode has no reward, and its group fails."""

    id: SampleId
    reason: str
    kind: str  # "error", "deadline" or "limit"
