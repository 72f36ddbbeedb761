"""Stage 2, pure: the owner of each KV page, and which prompts' pages can be shared. numpy only.

A page is owned by exactly one holder: a running sample (it writes there) or a prefix node (read only once ready).
Nodes form one tree a version: a path from the root spells a prefix, chunk by chunk, and each node holds the pages of
its chunk. Chunks start at multiples of the chunk size, so a prefix is computed by the same calls whichever sample asks
first; only a leaf may be shorter than a chunk. Samples of a group, and prompts with a common head, share nodes.
Where some layers attend within a window and others in full, a page lies in two pools, a smaller one for the former: a
sample gives back its places there once they are behind the window (`PagePool.shed`), and a node keeps them, so that
whoever finds the prefix finds all of it.
A recurrent state (models/linear_attention.py) is KV that cannot be cut: it has a place of its own, one a holder, and
stands for all positions up to one. So a prompt of such a model is one node, which nothing shorter or longer
shares, and whose state is that of its end; each sample of a group starts from a copy.
Laws: pages, states and nodes belong to one version; free + nodes' pages + samples' pages = all pages (`check`),
and so of states;
a node outlives its users and is evicted, leaf first and least recently used first, when pages run short.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dora_jax.types import Version

DUMMY = 0  # the page that padding rows read and write; nobody owns it
LOCAL = 1 << 32  # a page's number is its place among the pages of full layers, and LOCAL times that among the others'


def places(pages: Sequence[int] | np.ndarray, groups: int) -> np.ndarray:
    """i32[groups, ...]: where these pages lie in each pool; DUMMY where they have no place."""
    if groups == 1:
        return np.asarray(pages, np.int32)[None]
    numbers = np.asarray(pages, np.int64)
    return np.stack([numbers % LOCAL, numbers // LOCAL]).astype(np.int32)


class OutOfPages(RuntimeError):
    """The caller asked for more pages than it had checked for."""


class PagePool:
    """Pages 1 .. n; the owner version of each page in use."""

    def __init__(self, pages: int, page_size: int, local: int = 0):
        """local: places for the pages of layers with a window; 0: all layers' pages lie in one pool."""
        self.pages, self.local = pages, local
        self.page_size = page_size
        self._free = list(range(pages, 0, -1))  # a stack: low pages first
        self._free_local = list(range(local, 0, -1))
        self._owner: dict[int, Version] = {}

    @property
    def free(self) -> int:
        return min(len(self._free), len(self._free_local)) if self.local else len(self._free)

    def lacks(self, n: int, bare: int = 0) -> bool:
        """Whether so many are not free, of which `bare` need no place among those of layers with a window."""
        return n > len(self._free) or bool(self.local) and n - bare > len(self._free_local)

    def allocate(self, version: Version, n: int, bare: int = 0) -> list[int]:
        """The first `bare` of them hold nothing of layers with a window."""
        if self.lacks(n, bare):
            raise OutOfPages(f"{n} pages asked for version {version}, {self.free} are free")
        pages = [self._free.pop() for _ in range(n)]
        if self.local:
            pages[bare:] = [page + LOCAL * self._free_local.pop() for page in pages[bare:]]
        self._owner.update(dict.fromkeys(pages, version))
        return pages

    def shed(self, page: int) -> int:
        """The page without its place among those of layers with a window, which is free now."""
        if page < LOCAL:
            return page
        self._owner[page % LOCAL] = self._owner.pop(page)
        self._free_local.append(page // LOCAL)
        return page % LOCAL

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            full = self.shed(page)
            del self._owner[full]
            self._free.append(full)

    def check(self, held: Iterable[tuple[Version, Iterable[int]]]) -> None:
        """`held` lists every holder's (version, pages): together they are the owned pages, each once."""
        seen: dict[int, Version] = {}
        for version, pages in held:
            for page in pages:
                if page in seen:
                    raise RuntimeError(f"page {page} is held twice, by versions {seen[page]} and {version}")
                seen[page] = version
        if seen != self._owner:
            odd = min(set(seen.items()) ^ set(self._owner.items()))
            raise RuntimeError(f"page {odd[0]} of version {odd[1]} is held but not owned, or owned but not held")
        local = [page // LOCAL for page in seen if page >= LOCAL]
        for free, held_here, all_of_them in (
            (self._free, [page % LOCAL for page in seen], self.pages),
            (self._free_local, local, self.local),
        ):
            if sorted([*free, *held_here]) != list(range(1, all_of_them + 1)):
                raise RuntimeError(f"{len(free)} free + {len(held_here)} held pages are not {all_of_them}")


class StatePool:
    """Places 1 .. n for recurrent states; the owner version of each in use. Place 0 is nobody's, and all zeros."""

    def __init__(self, places: int):
        self.places = places
        self._free = list(range(places, 0, -1))
        self._owner: dict[int, Version] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, version: Version) -> int:
        """0 where the model has no states."""
        if not self.places:
            return 0
        if not self._free:
            raise OutOfPages(f"a recurrent state asked for version {version}, and all {self.places} are in use")
        place = self._free.pop()
        self._owner[place] = version
        return place

    def release(self, place: int) -> None:
        if place:
            del self._owner[place]
            self._free.append(place)

    def check(self, held: Iterable[tuple[Version, int]]) -> None:
        """`held` lists every holder's (version, place): together they are the owned ones, each once."""
        places = [(place, version) for version, place in held if place]
        if len(places) != len(self._owner) or dict(places) != self._owner:
            raise RuntimeError(f"recurrent states {sorted(places)} are held, and {sorted(self._owner.items())} owned")
        if sorted([*self._free, *self._owner]) != list(range(1, self.places + 1)):
            raise RuntimeError(f"{self.free} free + {len(places)} held recurrent states are not {self.places}")


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One chunk of a prefix: positions start .. start + length, and the pages that hold their KV."""

    version: Version
    parent: Node | None
    tokens: np.ndarray  # i32[n]
    start: int
    pages: list[int]
    users: int = 0  # samples that hold a path through this node
    children: dict[bytes, Node] = dataclasses.field(default_factory=dict)
    ready: bool = False  # its KV is written, or will be before any later call reads it
    uploading: bool = False  # its KV is on its way from the host: not to be computed
    routes: np.ndarray | None = None  # [n, M, k]: the experts of its tokens, where they are asked for
    filled: int = 0  # of its tokens, those that calls have computed or will
    state: int = 0  # the place of the recurrent state behind them

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def route(self, start: int, rows: np.ndarray) -> None:
        """The experts of the tokens from `start` on, [n, M, k]; those of the ones before are there."""
        before = self.routes if start > self.start else None
        self.routes = rows.copy() if before is None else np.concatenate([before, rows])


class PrefixIndex:
    """Prefix trees, one a version, and every allocation: what nobody uses is evicted when pages run short."""

    def __init__(self, pool: PagePool, chunk: int, states: StatePool | None = None):
        """chunk: tokens of a node at most. states: of nodes that are whole prompts."""
        self._pool, self._states = pool, states or StatePool(0)
        self._chunk = chunk
        self._roots: dict[Version, dict[bytes, Node]] = {}
        self._unused: dict[Node, None] = {}  # insertion order = least recently used first, leaves before parents
        self._evictable = 0  # pages of unused nodes

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out: free ones and those of prefixes that nobody uses."""
        return self._pool.free + self._evictable

    def lacks(self, n: int, bare: int) -> bool:
        """Whether `allocate` cannot hand out so many, of which `bare` hold nothing of layers with a window."""
        return self._pool.lacks(n - self._evictable, bare)

    def lacks_states(self, n: int) -> bool:
        """Whether so many recurrent states are not to be had."""
        return bool(self._states.places) and n > self._states.free + len(self._unused)

    def allocate_state(self, version: Version) -> int:
        while self._states.places and not self._states.free and self._unused:
            self._remove(next(iter(self._unused)))
        return self._states.allocate(version)

    def allocate(self, version: Version, n: int, bare: int = 0) -> list[int]:
        while self._pool.lacks(n, bare) and self._unused:
            self._remove(next(node for node in self._unused if not node.children))
        return self._pool.allocate(version, n, bare)

    def cost(self, version: Version, tokens: Sequence[int] | np.ndarray) -> int:
        """By how much `acquire` lowers `available`."""
        cost, siblings = 0, self._roots.get(version, {})
        for _, chunk in self._chunks(tokens):
            node = siblings.get(chunk.tobytes())
            siblings = node.children if node else {}
            if node is None or not node.users:
                cost += -(-len(chunk) // self._pool.page_size)
        return cost

    def acquire(self, version: Version, tokens: Sequence[int] | np.ndarray) -> list[Node]:
        """The path of these tokens; new nodes are not ready. OutOfPages leaves the index as it was."""
        if self.cost(version, tokens) > self.available or self.lacks_states(1):
            raise OutOfPages(
                f"a prefix of {len(tokens)} tokens costs {self.cost(version, tokens)} pages, "
                f"{self.available} are available; of recurrent states {self._states.free} are free"
            )
        path: list[Node] = []
        siblings = self._roots.setdefault(version, {})
        chunks = list(self._chunks(tokens))
        for _, chunk in chunks:  # take what exists first, so that no allocation evicts it
            node = siblings.get(chunk.tobytes())
            if node is None:
                break
            if node.users == 0:
                del self._unused[node]
                self._evictable -= len(node.pages)
            node.users += 1
            path.append(node)
            siblings = node.children
        for start, chunk in chunks[len(path) :]:
            pages = self.allocate(version, -(-len(chunk) // self._pool.page_size))
            node = Node(version, path[-1] if path else None, chunk.copy(), start, pages)
            node.state = self.allocate_state(version)
            siblings[chunk.tobytes()] = node
            node.users = 1
            path.append(node)
            siblings = node.children
        return path

    def release(self, path: Sequence[Node]) -> None:
        """Nodes that nobody waits for and that were never computed go at once; the others stay until evicted."""
        for node in reversed(path):
            node.users -= 1
            if node.users == 0:
                self._unused[node] = None
                self._evictable += len(node.pages)
                if not node.ready:
                    self._remove(node)

    def drop(self, version: Version) -> None:
        """Forget a version; raises while a sample holds one of its prefixes."""
        nodes = [node for node in self.nodes() if node.version == version]
        used = [node for node in nodes if node.users]
        if used:
            raise RuntimeError(f"version {version} has {len(used)} prefix nodes in use")
        for node in sorted(nodes, key=lambda node: -node.start):
            self._remove(node)
        self._roots.pop(version, None)

    def nodes(self) -> Iterator[Node]:
        stack = [node for roots in self._roots.values() for node in roots.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def check(self) -> None:
        """A child is of its parent's version, no more used than it, ready only after it; unused nodes are listed."""
        for node in self.nodes():
            parent = node.parent
            if parent is not None and (parent.version != node.version or parent.users < node.users):
                raise RuntimeError(f"prefix node at {node.start} of version {node.version} disagrees with its parent")
            if parent is not None and node.ready and not parent.ready:
                raise RuntimeError(f"prefix node at {node.start} is ready before its parent")
            if (node.users == 0) != (node in self._unused):
                raise RuntimeError(f"prefix node at {node.start} has {node.users} users and is listed wrongly")
        if self._evictable != sum(len(node.pages) for node in self._unused):
            raise RuntimeError(f"{self._evictable} evictable pages are counted, not what unused nodes hold")

    # ----------------------------------------------------------- private

    def _chunks(self, tokens: Sequence[int] | np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        tokens = np.asarray(tokens, np.int32)
        for start in range(0, len(tokens), self._chunk):
            yield start, tokens[start : start + self._chunk]

    def _remove(self, node: Node) -> None:
        siblings = node.parent.children if node.parent else self._roots[node.version]
        del siblings[node.tokens.tobytes()]
        del self._unused[node]
        self._evictable -= len(node.pages)
        self._pool.release(node.pages)
        self._states.release(node.state)


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """A prompt whose KV is held whether or not a sample uses it, from `pin` to `unpin`."""

    version: Version
    prompt_ids: np.ndarray
    path: list[Node]

    @property
    def computed(self) -> bool:
        return not self.path or self.path[-1].ready
