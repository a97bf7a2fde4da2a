"""What runs as one native function says what the same operations say one by one, alone and for many entries."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo_core.native import (
    each,
    if_so,
    inverse,
    loop,
    one_kernel,
    pick_in_turn,
    put_all,
    put_one,
    running_sum,
    sorted_again,
    turns,
    unless,
)

SIZE = 37


def everything(numbers, order):
    """Each of the functions, once."""
    is_odd, size = numbers % 2 == 1, numbers.size
    picked = pick_in_turn(numbers, is_odd, jnp.full(size + 1, -1, jnp.int32), jnp.int32(0))[:-1]
    sums = running_sum(numbers)
    return {
        "running_sum": sums,
        "inverse": inverse(order),
        "pick_in_turn": jnp.where(jnp.arange(size) < jnp.sum(is_odd), picked, -1),
        "put_all": put_all(jnp.zeros((size, 2), jnp.int32), (order,), jnp.stack([numbers, order], axis=1), is_odd),
        "put_one": put_one(numbers, order[0], jnp.int32(-7), is_odd[0]),
        "sorted_again": sorted_again(order, (order, numbers // 3, numbers % 2)),
        "unless": unless(jnp.all(numbers < 0), lambda: numbers, lambda: sums // 2),
        "if_so": if_so(is_odd[1], lambda x: (x[0] + 1, x[1]), (sums, numbers)),
        "loop": loop(5, lambda i, x: x + i * numbers, sums),
        "each": each(size, lambda i: jnp.sum(jnp.where(numbers == numbers[i], order, 0))),
        "turns": turns(lambda x: (x + numbers, jnp.max(x)), sums, 4),
    }


@pytest.fixture(scope="module")
def arguments():
    rng = np.random.default_rng(3)
    numbers = rng.integers(0, 9, (5, SIZE)).astype(np.int32)
    return numbers, np.stack([rng.permutation(SIZE).astype(np.int32) for _ in range(5)])


def test_a_kernel_says_what_its_operations_say_one_by_one(arguments):
    kernel, one_by_one = jax.jit(one_kernel(everything)), jax.jit(everything)
    side_by_side = jax.jit(jax.vmap(one_kernel(everything)))(*arguments)
    for entry in range(5):
        args = [a[entry] for a in arguments]
        expected = jax.tree.map(np.asarray, one_by_one(*args))
        assert expected["pick_in_turn"].max() > 0
        for name, found in kernel(*args).items():
            for got, want, many in zip(*map(jax.tree.leaves, (found, expected[name], side_by_side[name])), strict=True):
                assert np.asarray(got).tolist() == want.tolist(), name
                assert np.asarray(many[entry]).tolist() == want.tolist(), name


def test_turns_of_a_kernel_go_through_no_call(arguments):
    """A call in a loop, which the kernel's mark keeps from being inlined, doubles what a turn costs."""
    numbers, order = (a[0] for a in arguments)
    text = jax.jit(one_kernel(everything)).lower(numbers, order).compile().as_text()
    assert "while(" in text
    assert not re.findall(r"^%closed_call\S* \(", text, re.MULTILINE)
