"""Pages: one holder each, prefixes within a version only, eviction of what nobody uses."""

import random

import pytest

from dora_jax.rollout.pages import OutOfPages, PagePool, PrefixIndex


def new(pages=16, page_size=4, chunk=8):
    pool = PagePool(pages, page_size)
    return pool, PrefixIndex(pool, chunk)


def check(pool, index, private=()):
    index.check()
    pool.check([*((node.version, node.pages) for node in index.nodes()), *private])


def computed(index, version, tokens):
    path = index.acquire(version, tokens)
    for node in path:
        node.ready = True
    return path


def test_one_prefix_is_held_once_and_priced_before():
    pool, index = new()
    tokens = list(range(19))  # chunks of 8, 8 and 3: 2 + 2 + 1 pages
    assert index.cost(0, tokens) == 5
    first = computed(index, 0, tokens)
    assert [(node.start, node.stop, len(node.pages)) for node in first] == [(0, 8, 2), (8, 16, 2), (16, 19, 1)]
    assert index.cost(0, tokens) == 0 and index.cost(0, tokens[:16] + [99]) == 1
    assert index.acquire(0, tokens) == first and pool.free == 11
    check(pool, index)


def test_a_prefix_of_another_version_is_not_shared():
    _pool, index = new()
    tokens = list(range(8))
    assert index.cost(1, tokens) == 2
    zero, one = computed(index, 0, tokens), computed(index, 1, tokens)
    assert not {p for n in zero for p in n.pages} & {p for n in one for p in n.pages}
    index.release(one)
    index.drop(1)
    with pytest.raises(RuntimeError, match="version 0 has 1 prefix nodes in use"):
        index.drop(0)
    assert index.cost(1, tokens) == 2 and index.cost(0, tokens) == 0


def test_unused_prefixes_stay_until_pages_run_short_then_go_leaf_and_oldest_first():
    pool, index = new(pages=8)
    old = computed(index, 0, list(range(16)))
    young = computed(index, 0, list(range(100, 116)))
    index.release(old)
    index.release(young)
    assert pool.free == 0 and index.available == 8
    mine = index.allocate(0, 2)
    assert index.cost(0, list(range(8))) == 2 and index.cost(0, list(range(16))) == 4  # the old leaf is gone
    assert index.cost(0, list(range(100, 116))) == 4 and index.available == 6
    check(pool, index, [(0, mine)])
    with pytest.raises(OutOfPages, match="a prefix of 28 tokens costs 7 pages, 6 are available"):
        index.acquire(0, list(range(28)))
    check(pool, index, [(0, mine)])


def test_acquiring_does_not_evict_its_own_head():
    pool, index = new(pages=6)
    index.release(computed(index, 0, list(range(8))))  # older
    index.release(computed(index, 0, list(range(50, 58))))
    path = index.acquire(0, list(range(24)))
    assert [node.ready for node in path] == [True, False, False] and index.available == 0
    check(pool, index)


def test_what_was_never_computed_does_not_outlive_its_users():
    pool, index = new()
    first = index.acquire(0, list(range(12)))
    second = index.acquire(0, list(range(12)))
    index.release(first)
    assert pool.free == 13
    index.release(second)
    assert pool.free == 16 and not list(index.nodes())


def test_random_use_conserves_pages():
    rng = random.Random(0)
    pool, index = new(pages=24)
    held = []
    for _ in range(3000):
        version, tokens = rng.randrange(2), [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        if rng.random() < 0.5 and index.cost(version, tokens) <= index.available:
            before = index.available
            cost = index.cost(version, tokens)
            held.append((index.acquire(version, tokens), version, []))
            assert index.available == before - cost
            for node in held[-1][0]:
                node.ready |= rng.random() < 0.7 and (node.parent is None or node.parent.ready)
        elif held and rng.random() < 0.5:
            path, version, private = held.pop(rng.randrange(len(held)))
            index.release(path)
            pool.release(private)
        elif held and index.available:
            _, version, private = rng.choice(held)
            private += index.allocate(version, 1)
        check(pool, index, [(version, private) for _, version, private in held])
    for path, _, private in held:
        index.release(path)
        pool.release(private)
    assert index.available == 24


def test_check_finds_a_page_held_twice_or_lost():
    pool, _ = new()
    pages = pool.allocate(0, 2)
    with pytest.raises(RuntimeError, match=f"page {pages[0]} is held twice, by versions 0 and 1"):
        pool.check([(0, pages), (1, pages[:1])])
    with pytest.raises(RuntimeError, match="held but not owned, or owned but not held"):
        pool.check([(0, pages[:1])])
