"""Stage 3: the environments of a run's episodes, in worker processes, while generation goes on.

Consumes an episode at the end of each of its turns (`turn`; before the first one `open`); produces its answer (`poll`),
in any order. A process has one thread here, however many episodes wait (worker_process.py):

    open, turn -> Question -> [process: reset, step] -> bridge -> results -> poll

Laws: neither open, turn nor poll waits; each question has one answer, unless the episode was dropped or asked about
again meanwhile. An error is tried again environment.retries times where a retry can help; then, as after a deadline,
the episode fails with its group, and is never a reward of 0. A process that dies or answers late is killed and started
again, and its episodes are made again by their messages; so is an episode whose controller was killed. A replay whose
observations are not those that the policy saw loses the episode, which begins again. What was asked and not answered
when a process went is asked again once the next process is there.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dora_jax.config import ConfigError, EnvironmentSection
from dora_jax.tasks import code, sandbox
from dora_jax.tasks.environment import NO_POLICY, NOISE, EpisodePrompt, Message, PolicyFacts, called
from dora_jax.tasks.environments.bridge import Bridge, Conversation, TokenBridge
from dora_jax.tasks.environments.environment_worker import resolved
from dora_jax.tasks.environments.renderer_bridge import RendererBridge
from dora_jax.tasks.rewards import plain
from dora_jax.tasks.sandbox import calls
from dora_jax.tasks.source import identity_hash, shorten
from dora_jax.tasks.trial import TRIAL_POLL_S
from dora_jax.tasks.worker_process import Question, Questions, WorkerPool, WorkerProcess
from dora_jax.types import (
    EpisodeEnded,
    EpisodeFailed,
    EpisodeLost,
    EpisodeSoFar,
    Observed,
    Prompt,
    SampleId,
    issued_first_as,
)

Answer = Observed | EpisodeEnded | EpisodeFailed | EpisodeLost
GRACE_S = 10.0  # beyond its deadline, for an answer of a process that is busy; then it hangs
LENGTHS = 256  # failures are counted by the length of the response, in powers of two from here on
Dialogue = tuple[tuple[str, bool], ...]  # texts in order, and which of them the policy says


@dataclasses.dataclass(slots=True, eq=False)
class Episode:
    """What is known here of an episode that has not ended."""

    prompt: Prompt
    conversation: Conversation | None  # None: of an earlier controller, and a replay tells its turns again
    tokens: np.ndarray  # the prompt and all that followed
    messages: list[Message] = dataclasses.field(default_factory=list)  # of the policy
    turns: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # where they stand among `tokens`
    branches: int = 0
    retries: int = 0
    room: int = 0  # tokens that may still follow
    question: Question | None = None  # that is open
    terms: dict[str, float] = dataclasses.field(default_factory=dict)  # so far


class EnvironmentPool(WorkerPool[Question, Answer]):
    """The processes start at once, in the background."""

    def __init__(
        self, section: EnvironmentSection, bridge: Bridge | RendererBridge, seed: int, policy: PolicyFacts = NO_POLICY
    ):
        """bridge: of environments that speak messages. policy: for those that speak token ids."""
        super().__init__("environment", "environment.env", section.env)
        self._section, self._seed = section, seed
        self._bridge, self._token_bridge = bridge, TokenBridge(policy.stop_ids)
        self._stop_ids = policy.stop_ids
        self._episodes: dict[SampleId, Episode] = {}
        self._tokens: bool | Sequence[str] = False  # known once a process is ready: whether, or which tasks, have ids
        self._counts: collections.Counter[str] = collections.Counter()
        self._failed: collections.Counter[tuple[str, int]] = collections.Counter()
        self._seconds = 0.0
        noise = {name: getattr(section, f"noise_{name}") for name in (*NOISE, "late_s", "ramp_groups")}
        setup = {
            "name": section.name,
            "params": dict(section.params),
            "policy": dataclasses.asdict(policy),
            "step_timeout_s": section.step_timeout_s,
            "episode_timeout_s": section.episode_timeout_s,
            "observation_chars": section.observation_chars,
            "threads": section.threads,
            "noise": noise | {"seed": seed},
        }
        by = code.may_run("environment", "name", (section.name,), section.sandbox, section.sandbox_python)
        for _ in range(section.workers):
            process = calls.Process(
                "dora_jax.tasks.environments.environment_worker",
                setup,
                form=sandbox.best(),
                variables=section.env,
                sandbox_python=by,
                python=section.python,
            )
            fails = f"environment workers failed {calls.START_ATTEMPTS} times to start"
            self._workers.append(WorkerProcess(self, process, Questions(), fails=fails))

    def try_episodes(self, prompt: Prompt, encode: Callable[[str], Sequence[int]]) -> tuple[str, ...]:
        """Begins two episodes of a real row before anything is compiled, and answers with the row's answer and with
        nothing, because a policy writes anything. Returns the reward terms; ConfigError names the one that failed.
        Of an environment of token ids nothing is tried while there is no policy."""
        answer, ended = "" if prompt.answer is None else str(plain(prompt.answer)), list(self._stop_ids[:1])
        tried = () if self._bridge_of(prompt) is self._token_bridge and not ended else (answer, "")
        for index, text in enumerate(tried):
            text = text if text or ended else " "  # a turn has a token
            id, turn = SampleId(prompt.group_id, index), np.array([*encode(text), *ended], np.int32)
            self.open(id, prompt)
            answered = self._tried()
            if isinstance(answered, Observed):
                before = prompt.token_ids[: answered.keep]
                tokens = np.concatenate([before, answered.token_ids, turn])
                mask = np.arange(len(tokens) - len(before)) >= len(answered.token_ids)
                so_far = EpisodeSoFar(
                    id=id, version=0, tokens=tokens, mask=mask, logprobs=np.zeros(len(mask), np.float32), room=2**31
                )
                self.turn(prompt, so_far)
                answered = self._tried()
            self.drop(id)
            if isinstance(answered, EpisodeFailed | EpisodeLost):
                reason = answered.reason.removeprefix(f"{self._section.name}: ")
                raise ConfigError(
                    f"environment.name: {self._section.name} {reason}, tried with the message {shorten(text)!r} to the "
                    f"prompt {shorten(prompt.text)!r}"
                )
        with self._lock:  # what it measures is of the run alone
            self._counts.clear()
            self._failed.clear()
            self._seconds = 0.0
        return self.terms

    def _tried(self) -> Answer:
        while not (answers := self.poll()):
            time.sleep(TRIAL_POLL_S)
        return answers[0]

    def open(self, id: SampleId, prompt: Prompt) -> None:
        """Asks what follows the prompt before the first turn: Observed, perhaps of no tokens."""
        self.check()
        with self._lock:
            episode = self._episodes[id] = Episode(prompt, self._bridge_of(prompt).begin(prompt), prompt.token_ids)
            self._ask(id, episode)

    def turn(self, prompt: Prompt, so_far: EpisodeSoFar) -> None:
        """Asks for the answer to the last turn."""
        self.check()
        id, tokens = so_far.id, so_far.tokens
        # Where each run of True begins and ends, behind `offset`.
        mask = so_far.mask
        offset = len(tokens) - len(so_far.mask)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
        runs = [(int(a) + offset, int(b) + offset) for a, b in edges.reshape(-1, 2)]
        with self._lock:
            episode = self._episodes.get(id)
            if episode is None or len(episode.messages) + 1 != len(runs) and not episode.branches:
                conversation = None if runs[1:] else self._bridge_of(prompt).begin(prompt)
                episode = self._episodes[id] = Episode(prompt, conversation, tokens)
                episode.messages = [self._message(prompt, so_far, run) for run in runs[:-1]]
            episode.tokens, episode.turns, episode.room = tokens, runs, so_far.room
            episode.messages.append(self._message(prompt, so_far, runs[-1]))
            episode.retries = 0
            self._ask(id, episode)

    def drop(self, id: SampleId) -> dict[str, float]:
        """Forgets the episode; returns the reward terms so far."""
        with self._lock:
            episode = self._episodes.pop(id, None)
            if episode is None:
                return {}
            self._over(id, episode)
            return episode.terms

    @property
    def waiting(self) -> int:
        """Episodes with an open question."""
        with self._lock:
            return sum(episode.question is not None for episode in self._episodes.values())

    def stats(self) -> dict[str, float]:
        """Return counts and times since the start."""
        with self._lock:
            turns = max(1, self._counts["turns"])
            ended = self._counts["ended"] + self._counts["failed"]
            found = {
                "environment/turns": self._counts["turns"],
                "environment/turns_an_episode": self._counts["ended turns"] / max(1, self._counts["ended"]),
                "environment/observed_tokens": self._counts["observed"],
                "environment/seconds_a_turn": self._seconds / turns,
                "environment/failed_share": self._counts["failed"] / max(1, ended),
                "environment/retries": self._counts["retries"],
                "environment/redone": self._counts["lost"],
                "environment/branches": self._counts["branches"],
                "environment/cut_share": self._counts["cut"] / max(1, ended),
            }
            lengths = {f"environment/failed_{kind}_to_{n}": count for (kind, n), count in sorted(self._failed.items())}
            return found | lengths

    # ------------------------------------------------------------ private

    def _bridge_of(self, prompt: Prompt) -> Bridge | RendererBridge | TokenBridge:
        """The bridge of its task's environment, of messages or of token ids."""
        tokens = self._tokens
        return self._token_bridge if tokens is True or tokens and prompt.task in tokens else self._bridge

    def _message(self, prompt: Prompt, so_far: EpisodeSoFar, run: tuple[int, int]) -> Message:
        turn, bridge = so_far.tokens[slice(*run)], self._bridge_of(prompt)
        if not isinstance(bridge, TokenBridge):
            return bridge.message(turn)
        start = len(so_far.tokens) - len(so_far.mask)
        return bridge.message(turn, so_far.logprobs[run[0] - start : run[1] - start], so_far.version)

    def _of(self, id: SampleId) -> Questions:
        return self._workers[hash(id) % len(self._workers)].questions

    def _over(self, id: SampleId, episode: Episode) -> None:
        if episode.question is not None:  # its process need not answer it any more
            episode.question.dropped, episode.question.timeout_s = True, math.inf
        self._of(id).put(Question(name=self._section.name, timeout_s=math.inf, message={"id": id, "close": True}))

    def _ask(self, id: SampleId, episode: Episode) -> None:
        prompt = episode.prompt
        seed = identity_hash("environment", self._seed, issued_first_as(prompt.group_id))
        begin = {
            "task": prompt.task,
            "text": prompt.text,
            "answer": prompt.answer,
            "seed": seed,
            "row": dict(prompt.row),
        }
        message = {"id": id, "prompt": begin, "messages": list(episode.messages), "again": episode.conversation is None}
        if episode.question is not None:
            episode.question.dropped, episode.question.timeout_s = True, math.inf
        # Later than even a process answers that has lost the episode and plays its turns again.
        step_s = self._section.step_timeout_s + self._section.noise_late_s
        timeout_s = step_s * (1 + len(episode.messages)) + GRACE_S
        episode.question = Question(name=self._section.name, timeout_s=timeout_s, message=message)
        self._of(id).put(episode.question)

    # ------------------------------------------------------------ of its processes, on their threads

    def started(self, worker: WorkerProcess, properties: calls.Request) -> None:
        self.terms, self._tokens = tuple(properties["terms"]), properties["tokens"]

    def answered(self, question: Question, reply: calls.Request) -> None:
        id = SampleId(*question.message["id"])
        with self._lock:
            episode = self._episodes.get(id)
            if episode is None or episode.question is not question:
                return  # it was dropped, or asked about again
            took_s = max(0.0, time.monotonic() - question.sent_s)
            if reply.get("gone"):
                reply = {"error": f"hung for {took_s:.0f} s", "kind": "deadline"}
            elif "gone" in reply:
                reply = {"error": "its process died", "kind": "error", "retryable": True}
            else:
                self._seconds += took_s
                self._counts["turns"] += bool(episode.messages)
                episode.terms = reply.get("terms", {})
            episode.question = None
            answer = self._made(id, episode, reply)
            self._count(id, episode, answer)
            if id not in self._episodes and reply.get("done") is False:  # else its process has closed it
                self._over(id, episode)
        if answer is not None:
            self._results.put(answer)

    def _made(self, id: SampleId, episode: Episode, reply: calls.Request) -> Answer | None:
        """None: it is asked again."""
        if "lost" in reply:
            return EpisodeLost(id=id, reason=reply["lost"])
        if "error" in reply:
            return self._again(id, episode, f"{self._section.name}: {reply['error']}", reply)
        try:
            if reply["replayed"] and not self._replay(episode, reply["observed"][:-1]):
                return EpisodeLost(id=id, reason="the replay observed something else")
            last = reply["observed"][-1]
            if reply["done"]:
                return EpisodeEnded(id=id, terms=reply["terms"])
            if len(episode.messages) >= self._section.max_turns:
                return EpisodeEnded(id=id, terms=reply["terms"], finish="length")
            if not (last or episode.messages):
                return Observed(id=id, token_ids=episode.tokens[:0])
            turn = episode.tokens[slice(*episode.turns[-1])] if episode.turns else episode.tokens[:0]
            assert episode.conversation is not None  # a replay began it
            bridge = self._bridge_of(episode.prompt)
            ids, keep = bridge.observe(episode.conversation, episode.tokens, turn, last)
        except Exception as error:  # of a chat template or a tokenizer, which may raise anything over a message
            reason = f"{self._section.name}: its messages: {type(error).__name__}: {error}"
            return EpisodeFailed(id=id, reason=reason, kind="error")
        if keep == 0:
            reason = f"{self._section.name}: its conversation has no token of the row's prompt in front"
            return EpisodeFailed(id=id, reason=reason, kind="error")
        if episode.messages and len(ids) >= episode.room:  # no token of a further turn fits behind them
            return EpisodeEnded(id=id, terms=reply["terms"], finish="length")
        if episode.messages and not len(ids):
            return EpisodeFailed(id=id, reason=f"{self._section.name}: an answer has no token", kind="error")
        if keep is not None and episode.messages:
            episode.branches += 1
            if episode.branches > self._section.most_branches:  # ends as at max_turns, with the reward so far
                self._counts["cut"] += 1
                return EpisodeEnded(id=id, terms=reply["terms"], finish="length")
        # A message of token ids bounds the tokens of the next turn.
        most = int(last[0].get("max_tokens", 0)) if bridge is self._token_bridge else 0
        return Observed(id=id, token_ids=ids, keep=keep, turn_tokens=most)

    def _replay(self, episode: Episode, observed: Sequence[Sequence[Message]]) -> bool:
        """Whether the policy saw just this; the conversation then goes on behind it."""
        bridge = self._bridge_of(episode.prompt)
        conversation, at = bridge.begin(episode.prompt), len(episode.prompt.token_ids)
        turn = episode.tokens[:0]
        for (start, stop), messages in zip(episode.turns, observed, strict=True):
            ids, keep = (turn, None) if not len(messages) and not len(turn) else bridge.observe(
                conversation, episode.tokens[:at], turn, messages
            )  # fmt: skip
            if keep is not None or not np.array_equal(episode.tokens[at:start], ids):
                return False
            turn, at = episode.tokens[start:stop], stop
        episode.conversation = conversation
        return True

    def _again(self, id: SampleId, episode: Episode, reason: str, reply: calls.Request) -> EpisodeFailed | None:
        if reply.get("retryable") and episode.retries < self._section.retries:
            episode.retries += 1
            self._counts["retries"] += 1
            self._ask(id, episode)
            return None
        return EpisodeFailed(id=id, reason=reason, kind=reply["kind"])

    def _count(self, id: SampleId, episode: Episode, answer: Answer | None) -> None:
        match answer:
            case Observed(token_ids=token_ids, keep=keep):
                self._counts["observed"] += len(token_ids)
                self._counts["branches"] += keep is not None
                return
            case EpisodeEnded():
                self._counts["ended"] += 1
                self._counts["ended turns"] += len(episode.messages)
            case EpisodeFailed(kind=kind):
                self._counts["failed"] += 1
                n = max(1, len(episode.tokens) - len(episode.prompt.token_ids))
                self._failed[kind, max(LENGTHS, 1 << (n - 1).bit_length())] += 1
            case EpisodeLost():
                self._counts["lost"] += 1
            case None:
                return
        del self._episodes[id]


def rewrites(bridge: Bridge | RendererBridge, prompt: Prompt, turns: Sequence[np.ndarray]) -> bool:
    """Whether one of these turns, i32[n] each, is written anew in front of a user's next message."""
    for turn in turns:
        tokens = np.concatenate([prompt.token_ids, turn])
        with contextlib.suppress(Exception):  # of a template that takes no such message there, which rewrites nothing
            if bridge.observe(bridge.begin(prompt), tokens, turn, [{"role": "user", "content": "a"}])[1] is not None:
                return True
    return False


def worked_dialogues(
    section: EnvironmentSection, prompts: Iterable[tuple[str, Any, bool]], seed: int
) -> list[tuple[str, Dialogue]]:
    """What a policy would say and its environment, without noise, would answer, by the environment's `worked(prompt,
    slips)`: (prompt text, its dialogue) of each (prompt text, answer, whether it slips). ConfigError: there are no
    dialogues."""
    try:
        kind: Any = resolved(section.name)
    except calls.Declined as error:
        raise ConfigError(str(error)) from error
    if not hasattr(kind, "worked"):
        raise ConfigError(
            f"environment.name: {section.name} has no worked dialogues; warm-start on rows of your own (sft.rows), or "
            "name a model that can speak (model.path)"
        )

    async def played() -> list[tuple[str, Dialogue]]:
        found = []
        for i, (text, answer, slips) in enumerate(prompts):
            prompt = EpisodePrompt(text=text, answer=answer, seed=seed + i)
            environment = kind(**section.params)
            messages = kind.worked(prompt, slips)
            turns = [(str(message["content"]), False) for message in await called(environment.reset, prompt)]
            for message in messages:
                observed, done, _ = await called(environment.step, {"role": "assistant", "content": message})
                turns.append((message, True))
                if not done:
                    turns += [(str(each["content"]), False) for each in observed]
            await called(environment.close)
            found.append((text, tuple(turns)))
        return found

    return asyncio.run(played())
