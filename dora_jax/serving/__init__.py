"""The endpoint: HTTP requests of the OpenAI dialect -> samples of one engine fleet, each answer by one policy version.

    app.py       routes, the bearer token, streams that keep a client's connection alive        (Starlette)
    request.py   PURE  a request's JSON -> GenerateRequest (what is sampled) and Form (how it is sent), or a refusal
    chat.py      PURE  messages -> a prompt; tokens -> text as it grows; where a stop string ends it; text -> tool calls
    dialects.py  PURE  OpenAI's Responses and Anthropic's Messages -> a chat completion, and the way back
    reply.py     PURE  what was sampled -> the JSON bodies and stream chunks of each route
    answers.py   the answers that run: retries join them, a client that leaves frees their pages
    versions.py  PURE  which version serves a session, which one is loaded next, which one retires
    fleet.py     the engines of this process behind the `ServingFleet` protocol; checkpoints become versions
    client.py    what an agent needs of its own: a session's headers, its reward, its end
    verifiers.py tasksets of verifiers as environments of a run, whose own training client speaks this wire

One asyncio loop owns everything here but the engines, each of which has its own thread.
"""
