"""An MCP server of the official package, for the tests: by its stdin, or at the port of its argument."""

import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")
calls = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def count(word: str) -> str:
    """Tell how many words came before."""
    calls.append(word)
    return f"{word} is number {len(calls)} of {os.environ.get('MARK', 'none')}"


@server.tool()
def long(n: int) -> str:
    """Write much."""
    return "x" * n


@server.tool()
def fail() -> str:
    """Fail."""
    raise RuntimeError("out of paper")


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
