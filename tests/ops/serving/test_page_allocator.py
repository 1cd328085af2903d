import numpy as np
import pytest

import jaxfused
from jaxfused import OutOfPages, PageAllocator


def read(allocator, name, tokens):
    """Reads a prompt as a server does, and returns how many of its tokens were known."""
    known = allocator.start(name, tokens)
    allocator.reserve(name, len(tokens) - known)
    allocator.written(name, tokens[known:])
    return known


def pages(allocator, name):
    return [int(page) for page in allocator.table([name])[0]]


def test_every_page_has_one_owner_unless_it_is_shared():
    allocator = PageAllocator(pages=10, page_size=3)
    assert read(allocator, "a", list(range(8))) == 0
    assert read(allocator, "b", list(range(7))) == 6
    assert read(allocator, "c", [5, *range(7)]) == 0
    a, b, c = (pages(allocator, name) for name in "abc")
    assert a[:2] == b[:2] and len(set(a + b + c)) == len(a) + len(b) + len(c) - 2
    assert allocator.available == 10 - 7
    table = allocator.table(["b", None, "c"], 5)
    np.testing.assert_array_equal(table[1], -1)
    np.testing.assert_array_equal(table[0], [*b, -1, -1])
    assert table.dtype == np.int32


def test_the_last_token_is_never_known():
    allocator = PageAllocator(pages=4, page_size=2)
    read(allocator, "a", [1, 2, 3, 4])
    assert allocator.start("b", [1, 2, 3, 4]) == 2
    assert allocator.start("c", [1, 2, 3, 4, 5]) == 4
    assert allocator.start("d", [3, 4, 1, 2, 5]) == 0


def test_freed_pages_are_found_until_they_are_needed():
    allocator = PageAllocator(pages=4, page_size=2)
    read(allocator, "a", [1, 2, 3, 4])
    allocator.free("a")
    assert allocator.available == 4
    assert read(allocator, "b", [1, 2, 3, 4, 5]) == 4
    allocator.free("b")
    # Three of four pages are needed: the two that are empty, and the end of what was known.
    assert read(allocator, "c", [9] * 6) == 0
    allocator.free("c")
    assert allocator.start("d", [1, 2, 3, 4, 5]) == 2


def test_a_page_that_two_sequences_wrote_is_found_once():
    allocator = PageAllocator(pages=6, page_size=2)
    for name in "ab":
        allocator.start(name)
        allocator.reserve(name, 4)
    for name in "ab":
        allocator.written(name, [1, 2])
        allocator.written(name, [3, 4])
    assert not set(pages(allocator, "a")) & set(pages(allocator, "b"))
    assert allocator.start("c", [1, 2, 3, 4, 5]) == 4
    assert pages(allocator, "c") == pages(allocator, "a")
    for name in "abc":
        allocator.free(name)
    assert allocator.available == 6


def test_a_pool_that_runs_out_takes_nothing():
    allocator = PageAllocator(pages=3, page_size=2)
    read(allocator, "a", [1, 2, 3])
    allocator.start("b")
    with pytest.raises(OutOfPages, match="3 tokens of 'b' need 2 more pages, but 1 of 3 are free"):
        allocator.reserve("b", 3)
    assert allocator.available == 1 and pages(allocator, "b") == []
    allocator.free("a")
    allocator.reserve("b", 3)


def test_many_random_requests_leave_every_page():
    rng = np.random.default_rng(0)
    allocator, alive = PageAllocator(pages=20, page_size=4), []
    for name in range(300):
        tokens = rng.integers(0, 2, rng.integers(1, 30)).tolist()
        try:
            read(allocator, name, tokens)
            alive.append(name)
        except OutOfPages:
            allocator.free(name)
        while allocator.available < 6 and alive:
            allocator.free(alive.pop(int(rng.integers(len(alive)))))
        users = np.bincount([p for n in alive for p in pages(allocator, n)], minlength=20)
        assert allocator.available == np.sum(users == 0)
    for name in alive:
        allocator.free(name)
    assert allocator.available == 20


def test_refuses():
    allocator = PageAllocator(pages=2, page_size=2)
    allocator.start("a")
    for call, message in [
        (lambda: PageAllocator(0, 2), "pages is 0"),
        (lambda: allocator.start("a"), "'a' has been started"),
        (lambda: allocator.reserve("a", -1), "count is -1, but it counts tokens"),
        (lambda: allocator.reserve("a", 1.5), "count is 1.5, but it counts tokens"),
        (lambda: allocator.start([1], [1]), r"name is \[1\]"),
        (lambda: allocator.start("b", [1.5]), "tokens have dtype float64"),
        (lambda: allocator.written("a", "ab"), "tokens have dtype <U2"),
        (lambda: allocator.table("a"), "names is 'a'"),
        (lambda: allocator.table(["a"], -1), "width is -1, but it counts pages"),
        (lambda: allocator.free("b"), "PageAllocator.free: there is no 'b'"),
        (
            lambda: allocator.written("a", [1]),
            "1 tokens of 'a' were written, but its pages have room",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    allocator.reserve("a", 3)
    with pytest.raises(ValueError, match="width is 1, but a sequence has 2 pages"):
        allocator.table(["a"], 1)
    assert jaxfused.PageAllocator is PageAllocator
