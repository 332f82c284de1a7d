"""A harness of verifiers that asks the policy once, in the process of the player.

The harness "null" starts a program for each episode, which takes longer than a tiny model's answer.
A task with tools needs it, and is then one more line of CONFIG in play.py.
"""

import ssl

import httpx
import verifiers.v1 as vf

TLS = ssl.create_default_context()
"""Shared by all clients: each would read the certificates again, which takes 50 ms."""


class InProcess(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_text_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        body = {"model": ctx.model, "messages": messages}
        async with httpx.AsyncClient(timeout=None, verify=TLS) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {secret}"},
            )
        return vf.ProgramResult(int(answer.is_error), "", answer.text)


__all__ = ["InProcess"]
