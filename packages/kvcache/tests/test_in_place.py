"""No operation copies an array as long as the pool: looked for in the compiled program, whatever groups and quotas there are."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import octavo_kvcache as kv
from octavo_core.specs import CacheSpec

pytestmark = pytest.mark.slow

POOL, SIDE = 4096, 2048
CACHES = {
    "full": kv.RadixCache(CacheSpec((POOL,), 16, 8, 32)),
    "quotas": kv.RadixCache(CacheSpec((POOL,), 16, 8, 32), quotas=(100, 200)),
    "window and state": kv.RadixCache(CacheSpec((POOL, SIDE, SIDE), 16, 8, 32, ("full", "window", "state"), (0, 100, 0))),
}
OPTIONS = {"xla_cpu_copy_insertion_use_region_analysis": True, "xla_backend_optimization_level": 0}

ints = functools.partial(jnp.zeros, dtype=jnp.int32)


def calls(cache: kv.RadixCache) -> dict:
    """Each operation and its arguments."""
    groups = cache.spec.groups
    prompt, space = ints(512), jnp.zeros(2, jnp.uint32)
    found = kv.Match(ints(32), ints(32), ints(()), space)
    deepest, policy = 31, cache.policy
    return {
        "admit": (
            cache.admit,
            ints(2),
            ints((2, 512)),
            ints(2),
            jnp.zeros((2, 2), jnp.uint32),
            ints(2),
            ints((2, groups)),
            ints(groups),
        ),
        "grow": (cache.grow, ints((8, groups)), ints(8)),
        "commit": (cache.commit, ints((8, 512)), ints(8)),
        "release": (cache.release, jnp.zeros(8, bool)),
        "tree allocate": (functools.partial(kv.allocate, size=16), ints(())),
        "tree insert": (kv.insert, found, prompt, ints(32), ints(32), space),
        "tree lease": (kv.lease, ints(32), ints(32)),
        "tree release": (functools.partial(kv.release, policy=policy), ints(32), ints(32)),
        "tree evict": (lambda radix, count: kv.evict(radix, count, policy, max_depth=deepest), ints(())),
        "tree lend": (functools.partial(kv.lend, size=16, max_depth=deepest, policy=policy), ints(())),
        "tree settle": (kv.settle, kv.Loan(ints(16), ints(16), ints(16), ints(())), jnp.zeros(16, bool)),
    }


def pool_copies(operation, state, *arguments) -> list[str]:
    """Instructions of the compiled program that copy an array as long as a pool."""
    text = jax.jit(operation, donate_argnums=0).lower(state, *arguments).compile(compiler_options=OPTIONS).as_text()
    copies = [line.strip() for line in text.splitlines() if " copy(" in line]
    return [line for line in copies if any(str(n) in line.split(" copy(")[0] for n in (POOL, SIDE))]


SEAM = [(cache, name) for cache in CACHES for name in ("admit", "grow", "commit", "release")]
TREE = [("full", name) for name in calls(CACHES["full"]) if name.startswith("tree")]


@pytest.mark.parametrize(("cache", "name"), SEAM + TREE)
def test_an_operation_copies_nothing_as_long_as_the_pool(cache, name):
    object_ = CACHES[cache]
    operation, *arguments = calls(object_)[name]
    state = object_.init()
    assert pool_copies(operation, state.radix if name.startswith("tree") else state, *arguments) == []


def test_a_copy_as_long_as_the_pool_would_be_seen():
    def careless(state):
        return state._replace(stamp=state.stamp + state.depth[::-1], depth=state.stamp)

    assert pool_copies(careless, CACHES["full"].init().radix) != []


def test_the_longest_lists_of_kernels_compile_where_xla_has_threads_to_share_them_among():
    """An operation that is shared among threads makes a kernel fail to compile; lists just too long for a kernel are compiled by parts."""
    for size in (1024, 1040):
        spec = CacheSpec((300_000,), 32, 4, size)
        cache = kv.RadixCache(spec, max_commits=256 + size % 1024)
        state = jax.eval_shape(cache.init)
        names, blocks = ints(size), size // 4
        prompt = ints(32 * blocks)
        found = kv.Match(names, names, ints(()), jnp.zeros(2, jnp.uint32))

        def operations(radix, names=names, prompt=prompt, found=found, blocks=blocks):
            radix, _ = kv.lease(radix, names, names)
            radix, _ = kv.release(radix, names, names)
            radix, *_ = kv.insert(radix, found, prompt, names[:blocks], names[:blocks], found.chain)
            return kv.evict(radix, ints(()), cache.policy, max_depth=size - 1, batch=size)  # noqa: B023

        jax.jit(operations, donate_argnums=0).lower(state.radix).compile(OPTIONS)
        for name, arguments in (("commit", (ints((4, 32 * size)), ints(4))), ("release", (jnp.zeros(4, bool),))):
            jax.jit(getattr(cache, name), donate_argnums=0).lower(state, *arguments).compile(OPTIONS)
