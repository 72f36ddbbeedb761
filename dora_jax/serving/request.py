"""A request's JSON -> what is sampled (`GenerateRequest`) and how the answer is sent (`Form`). Pure.

Laws: a parameter that the engine cannot honour is refused by name, never dropped; equal requests mean the same work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dora_jax.types import MAX_BIASES, MAX_TOP_LOGPROBS, WHOLE, Sampling

Json = Mapping[str, Any]
Encode = Callable[[str], list[int]]

MAX_CHOICES = 128  # of one request
TOKEN_BYTES = 8  # of a request, on average
MAX_SAMPLES = 4096  # of all answers at once; more are refused (429), and a request of more that can never run (400)
# a turn is trained at its own temperature from here to there: log-probs near 0 or of noise alone move the weights too
# far, or nowhere
TRAINED_TEMPERATURES = (0.1, 10.0)
COMPLETION_TOKENS = 16  # max_tokens of /v1/completions where the request names none, as OpenAI has it

# They change no token: what a client says for its own accounts, or hints at schedules and styles.
IGNORED = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "cache_salt",
        "priority",
        "request_id",
        "routed_experts_prompt_start",  # where the routes begin that an answer may hold; ours holds none
        "reasoning_effort",
        "verbosity",
    }
)
# Accepted at the value that changes nothing (or absent); the engine has no such thing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "echo": (False,),
    "suffix": ("",),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "best_of": (1,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "add_special_tokens": (False,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "continue_final_message": (False,),
}
SAMPLING = ("temperature", "top_p", "top_k", "min_p")  # the run's where a request does not say
# name -> (its range, the value that changes nothing); of a request alone
NUMBERS: dict[str, tuple[float, float, float | None]] = {
    "temperature": (0.0, 100.0, None),
    "top_p": (0.0, 1.0, None),
    "min_p": (0.0, 1.0, None),
    "presence_penalty": (-2.0, 2.0, 0.0),
    "frequency_penalty": (-2.0, 2.0, 0.0),
    "repetition_penalty": (0.01, 100.0, 1.0),
}
READ = frozenset(  # by every route
    {
        "model",
        "n",
        "seed",
        "max_tokens",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "logprobs",
        "stream",
        "stream_options",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "min_tokens",
        "logit_bias",
        "parallel_tool_calls",
        "top_k",
        *NUMBERS,
    }
)


class Refused(Exception):
    """A request that gets no answer: the HTTP status and the error body's fields."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "authentication_error" if status == 401 else ""
        error = {"message": message, "type": kind or "invalid_request_error", "param": param, "code": code}
        self.body: dict[str, Any] = {"error": error}


@dataclass(frozen=True)
class ServedLimits:
    """What the engines are compiled for."""

    context: int  # tokens of prompt and answer together
    vocab: int
    sampling: tuple[tuple[str, float], ...]  # name -> the run's value

    @property
    def body_bytes(self) -> int:
        """The longest request: as many prompts as it may have, all of them as long as they may be."""
        return (1 << 20) + MAX_CHOICES * self.context * TOKEN_BYTES

    def exceeded(self, tokens: int | str) -> Refused:
        return Refused(
            400,
            f"This model's maximum context length is {self.context} tokens. However, the prompt has {tokens}.",
            param="prompt",
            code="context_length_exceeded",
        )


@dataclass(frozen=True)
class GenerateRequest:
    """What is sampled: `n` choices for each prompt, by one version."""

    prompts: tuple[tuple[int, ...], ...]
    n: int = 1
    max_tokens: int = COMPLETION_TOKENS
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    keep_special: bool = False
    seed: int | None = None
    sampling: Sampling | None = None  # None: as the run samples
    chat: bool = False  # what is thought is taken out of the text,
    tools: bool = False  # and tool calls
    texts: frozenset[tuple[str, str]] = frozenset()  # (function, parameter) whose value is a text
    one_call: bool = False  # the answer ends with its first tool call
    scores_prompt: bool = False  # the prompt's tokens get log-probs as well

    @property
    def differs(self) -> str:
        """Why no turn of an episode can be the answer; empty: one can."""
        if self.n > 1:
            return f"it wants {self.n} choices (n), and a turn is one"
        for name, value, neutral in (("stop_token_ids", self.stop_ids, frozenset()),
                                     ("parallel_tool_calls=false", self.one_call and self.tools, False),
                                     ("prompt_logprobs", self.scores_prompt, False)):  # fmt: skip
            if value != neutral:
                return f"{name} changes what is sampled or reported, and a turn samples as the run does"
        least, most = TRAINED_TEMPERATURES
        for each in dataclasses.fields(Sampling) if self.sampling else ():
            value = getattr(self.sampling, each.name)
            if each.name == "temperature" and value is not None and not least <= value <= most:
                return f"temperature is not between {least:g} and {most:g}, where turns are trained"
            if each.name != "temperature" and value != each.default:
                return f"{each.name} is not the run's, and a turn samples as the run does"
        return ""

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)


@dataclass(frozen=True)
class Form:
    """How the answer is sent."""

    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0  # of each token
    prompt_logprobs: int | None = None  # of each token of the prompt; None: no such list
    echo: bool = False  # the prompt stands before the answer
    token_ids: bool = False
    token_names: bool = False  # a token's text is "token_id:52"


def completion(body: Json, limits: ServedLimits, encode: Encode) -> tuple[GenerateRequest, Form]:
    """`POST /v1/completions`."""
    check(body, "prompt", "echo", "prompt_logprobs")
    prompt: Any = body.get("prompt")
    prompts: list[tuple[int, ...]] = []
    several = isinstance(prompt, list) and prompt and not _is_ids(prompt)
    for one in prompt if several else [prompt]:
        if not isinstance(one, str) and not _is_ids(one):
            raise Refused(400, "prompt: neither a text, nor a list of token ids, nor a list of these", param="prompt")
        prompts.append(tuple(encode(one) if isinstance(one, str) else one))
    if len(prompts) > MAX_CHOICES:
        raise Refused(400, f"prompt: {len(prompts)} prompts are more than {MAX_CHOICES}", param="prompt")
    top = _integer(body, "logprobs", None, 0, MAX_TOP_LOGPROBS)
    form = _form(body, top is not None, top or 0)
    return _generate_request(body, limits, tuple(prompts), COMPLETION_TOKENS, form), form


def chat(
    body: Json, limits: ServedLimits, prompt_ids: Sequence[int], *, tools: Sequence[Json] = (), grammar: str = ""
) -> tuple[GenerateRequest, Form]:
    """`POST /v1/chat/completions`, whose messages are `prompt_ids` by now. tools: that the policy sees. grammar: what
    the answer must look like."""
    if body.get("max_completion_tokens") is not None:
        body = {**body, "max_tokens": body["max_completion_tokens"]}
    top = _integer(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS) or 0
    if top and not _flag(body, "logprobs"):
        raise Refused(400, "top_logprobs: they come with logprobs, which is not true", param="top_logprobs")
    form = _form(body, _flag(body, "logprobs"), top)
    texts = set()
    for function in (tool["function"] for tool in tools):
        parameters = function.get("parameters")
        fields = parameters.get("properties") if isinstance(parameters, Mapping) else None
        for name, field in fields.items() if isinstance(fields, Mapping) else ():
            if isinstance(field, Mapping) and field.get("type") == "string":
                texts.add((function["name"], name))
    wanted = _generate_request(body, limits, (tuple(prompt_ids),), None, form)
    wanted = dataclasses.replace(wanted, chat=True, tools=bool(tools), texts=frozenset(texts))
    if grammar:
        wanted = dataclasses.replace(
            wanted, sampling=dataclasses.replace(wanted.sampling or Sampling(), grammar=grammar)
        )
    return wanted, form


def generate(body: Json, limits: ServedLimits) -> tuple[GenerateRequest, Form]:
    """`POST /inference/v1/generate`: token ids in, token ids out."""
    params = body.get("sampling_params") or {}
    if not isinstance(params, Mapping):
        raise Refused(400, "sampling_params: not an object", param="sampling_params")
    known = {"model", "token_ids", "sampling_params", "stream", *IGNORED}
    if unknown := sorted(set(body) - known):
        raise Refused(400, f"{unknown[0]}: unknown parameter", param=unknown[0])
    if _flag(body, "stream"):
        raise Refused(400, "stream: /inference/v1/generate answers in one piece", param="stream")
    check(params)
    ids = body.get("token_ids")
    if not _is_ids(ids):
        raise Refused(400, "token_ids: not a list of token ids", param="token_ids")
    _integer(params, "logprobs", None, 0, 1)
    form = Form(logprobs=True, token_ids=True, token_names=True)
    return _generate_request(params, limits, (tuple(ids or ()),), None, form), form


def check(body: Json, *own: str) -> None:
    """Refuses what is unknown, and what the engine cannot do. `own`: parameters that the route reads itself."""
    known = {*own, *READ, *IGNORED, *NEUTRAL}
    for name, value in body.items():
        if name not in known:
            raise Refused(400, f"{name}: unknown parameter", param=name)
        if value is None or name in own or name in IGNORED:
            continue
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise Refused(400, f"{name}: this endpoint does not have it; leave it out", param=name)


def rewards(body: Json) -> dict[int, float]:
    """`POST /v1/sessions/ID/reward`: by turn, counted from 0, or of the whole session."""
    if unknown := sorted(set(body) - {"reward", "turn", "rewards"}):
        raise Refused(400, f"{unknown[0]}: unknown parameter", param=unknown[0])
    turn = _integer(body, "turn", WHOLE, 0, None)
    several = body.get("rewards")
    if several is not None and (not isinstance(several, list) or {"reward", "turn"} & set(body)):
        raise Refused(400, "rewards: not a list with the reward of each turn, alone", param="rewards")
    found = {turn: body.get("reward")} if several is None else dict(enumerate(several))
    for value in found.values():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise Refused(400, f"reward: {repr(value)[:40]} is no number", param="reward")
    return {WHOLE if turn is None else turn: float(value) for turn, value in found.items()}  # type: ignore[arg-type]


# ---------------------------------------------------------------- private


def _generate_request(
    body: Json, limits: ServedLimits, prompts: tuple[tuple[int, ...], ...], tokens: int | None, form: Form
) -> GenerateRequest:
    """tokens: where the request names no max_tokens; None: as many as fit."""
    for prompt in prompts:
        if not prompt:
            raise Refused(400, "prompt: it has no token", param="prompt")
        if min(prompt) < 0 or max(prompt) >= limits.vocab:
            raise Refused(400, f"prompt: a token id is not between 0 and {limits.vocab - 1}", param="prompt")
        if len(prompt) >= limits.context:
            raise limits.exceeded(len(prompt))
    longest = max(map(len, prompts))
    room = limits.context - longest
    tells_prompt = form.echo or form.prompt_logprobs is not None
    most = min(room, _integer(body, "max_tokens", tokens or room, 0 if tells_prompt else 1, None) or 0)
    n = _integer(body, "n", 1, 1, MAX_CHOICES) or 1
    if n * len(prompts) > MAX_SAMPLES:
        raise Refused(400, f"n: {len(prompts)} prompts x {n} are more than {MAX_SAMPLES} samples", param="n")
    stops, stop_ids = body.get("stop"), body.get("stop_token_ids") or []
    stops = [stops] if isinstance(stops, str) else stops or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise Refused(400, "stop: neither a text nor a list of texts, none of them empty", param="stop")
    if not _is_ids(stop_ids):
        raise Refused(400, "stop_token_ids: not a list of token ids", param="stop_token_ids")
    return GenerateRequest(
        prompts=prompts,
        n=n,
        max_tokens=most,
        stop=tuple(stops),
        stop_ids=frozenset(stop_ids),
        include_stop=_flag(body, "include_stop_str_in_output"),
        keep_special=not _flag(body, "skip_special_tokens", True),
        seed=_integer(body, "seed", None, None, None),
        sampling=_sampling(body, limits, most, max(form.top_logprobs, form.prompt_logprobs or 0)),
        one_call=not _flag(body, "parallel_tool_calls", True),
        scores_prompt=(form.echo and form.logprobs) or form.prompt_logprobs is not None,
    )


def _sampling(body: Json, limits: ServedLimits, max_tokens: int, top_logprobs: int) -> Sampling | None:
    """None: every value is the run's."""
    run: dict[str, float] = dict(limits.sampling)
    own: dict[str, Any] = {}
    for name, (low, high, neutral) in NUMBERS.items():
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise Refused(400, f"{name}: {repr(value)[:40]} is no number between {low:g} and {high:g}", param=name)
        if value != run.get(name, neutral):
            own[name] = float(value)
    top_k = max(0, _integer(body, "top_k", 0, -1, None) or 0)
    if body.get("top_k") is not None and top_k != max(0, run["top_k"]):
        own["top_k"] = min(top_k, limits.vocab)
    if least := _integer(body, "min_tokens", 0, 0, max_tokens):
        own["min_tokens"] = least
    biases = body.get("logit_bias") or {}
    try:
        few = biases.items() if len(biases) <= MAX_BIASES else ()
        pairs = sorted((int(id), float(bias)) for id, bias in few)
        inside = len(pairs) == len(biases) and all(0 <= id < limits.vocab and -100 <= bias <= 100 for id, bias in pairs)
    except (AttributeError, TypeError, ValueError):
        inside, pairs = False, []
    if not inside:
        raise Refused(
            400,
            f"logit_bias: not an object of at most {MAX_BIASES} token ids, each with a number between -100 and 100",
            param="logit_bias",
        )
    if pairs:
        own["biased_ids"], own["biases"] = zip(*pairs, strict=True)
    if top_logprobs:
        own["top_logprobs"] = top_logprobs
    return Sampling(**own) if own else None


def _form(body: Json, logprobs: bool, top_logprobs: int) -> Form:
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping) or set(options) - {"include_usage", "continuous_usage_stats"}:
        raise Refused(400, "stream_options: it takes include_usage alone", param="stream_options")
    of_prompt = _integer(body, "prompt_logprobs", None, 0, MAX_TOP_LOGPROBS)
    if of_prompt is not None and _flag(body, "stream"):
        raise Refused(400, "prompt_logprobs: a stream does not tell them", param="prompt_logprobs")
    return Form(
        stream=_flag(body, "stream"),
        include_usage=_flag(options, "include_usage"),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        prompt_logprobs=of_prompt,
        echo=_flag(body, "echo"),
        token_ids=_flag(body, "return_token_ids"),
        token_names=_flag(body, "return_tokens_as_token_ids"),
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in value)


def _flag(body: Json, name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(400, f"{name}: {value!r} is neither true nor false", param=name)
    return default if value is None else value


def _integer(body: Json, name: str, default: int | None, low: int | None, high: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(400, f"{name}: {value!r} is not a whole number", param=name)
    if (low is not None and value < low) or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise Refused(400, f"{name}: {value} is not {limits}", param=name)
    return value
