"""The wire of an OpenEnv server, for the tests: an environment that says a message again and ends at "end"."""

import asyncio
import json
import sys

from websockets.asyncio.server import serve

MOST = int(sys.argv[1]) if sys.argv[1:] else 64
sessions = set()  # that are open


async def episode(socket):
    sessions.add(socket)
    try:
        await session(socket)
    finally:
        sessions.discard(socket)


async def session(socket):
    turns = 0
    if len(sessions) > MOST:
        await socket.send(json.dumps({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}))
        return
    async for frame in socket:
        asked = json.loads(frame)
        kind, data, error = asked["type"], asked["data"], None
        if data.get("silent"):
            continue
        if kind == "reset":
            seen = {"echoed_message": f"seed {data['seed'] >= 0}"}
        elif "message" not in data:
            error = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": ["message"]}
        elif data["message"] == "full":
            error = {"message": "no room", "code": "CAPACITY_REACHED"}
        elif data["message"] == "leave":
            return
        else:
            turns += 1
            seen = {"echoed_message": data["message"] + data.get("mark", ""), "message_length": turns}
        answer = {"type": "error", "data": error}
        if error is None:
            done = data.get("message") == "end"
            answer = {"type": "observation", "data": {"observation": seen, "reward": 0.5 * turns, "done": done}}
        await socket.send(json.dumps(answer))


async def main():
    async with serve(episode, "127.0.0.1", 0) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


asyncio.run(main())
