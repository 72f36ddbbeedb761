"""A taskset of verifiers for the tests: two turns of a conversation, scored by the share of the letter a in them.

Its harness asks for an answer from the process of the rollout; the library's own ones start a program for each.
"""

import httpx
import verifiers.v1 as vf


class Letters(vf.Task[vf.TaskData]):
    @vf.reward
    async def share(self, trace: vf.Trace) -> float:
        text = "".join(m.content or "" for m in trace.branches[-1].messages if m.role == "assistant")
        return text.count("a") / max(1, len(text))


class Words(vf.Taskset[Letters, vf.TasksetConfig]):
    def load(self):
        for i in range(64):
            text = "".join("bcde"[i >> 2 * k & 3] for k in range(3))
            yield Letters(vf.TaskData(prompt=text), self.config.task)


class Chat(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    SUPPORTS_RESUME = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        body = {"model": ctx.model, "messages": [{"role": m.role, "content": m.content or ""} for m in messages]}
        async with httpx.AsyncClient(timeout=None, headers={"Authorization": f"Bearer {secret}"}) as client:
            for _ in range(3):
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if answer.status_code < 500:  # else as the clients of other harnesses do: once more
                    break
        return vf.ProgramResult(exit_code=0 if answer.is_success else 1, stdout="", stderr=answer.text)


class Talk(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            if not (await talk.turn()).terminated:
                await talk.turn("d")


__all__ = ["Chat", "Letters", "Talk", "Words"]
