"""KV groups that look back a limited way, beside groups that keep everything: what is held, given up, found and copied."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_core.plan import OK, OUT_OF_BLOCKS

BS = 2
A = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
FULL_AND_WINDOW = {"num_blocks": (40, 8), "kinds": ("full", "window"), "windows": (0, 3)}
FULL_AND_STATE = {"num_blocks": (40, 8), "max_blocks": 7, "kinds": ("full", "state"), "windows": (0, 0)}


def stepwise(cache, sequence, tokens, *, chunk=BS) -> int:
    """A life in steps of `chunk` tokens, as a scheduler leads it, up to the release; answers the tokens found.

    What is out of reach is given up as the next step begins, here by one that asks for nothing.
    """
    found, status = cache.admit(sequence, tokens, want=0)
    assert status == OK
    for upto in range(found + chunk, len(tokens) + chunk, chunk):
        upto = min(upto, len(tokens))
        assert cache.grow({sequence: -(-upto // BS)})[1][sequence] == OK
        cache.commit({sequence: tokens[:upto]})
    cache.grow({})
    return found


def served(cache, tokens) -> int:
    found = stepwise(cache, 0, tokens)
    cache.release(0)
    return found


def hit(cache, tokens) -> int:
    found, status = cache.admit(1, [*tokens, 0], want=0)
    cache.release(1)
    assert status == OK
    return found


def counts(cache, group=1) -> tuple[int, int]:
    """Free and idle cached blocks of a group."""
    events = cache.release()
    return int(events.num_free[group]), int(events.num_evictable[group])


# Windows.


def test_blocks_behind_the_window_are_given_up_and_become_evictable(drive):
    cache = drive(**FULL_AND_WINDOW)
    stepwise(cache, 0, A)
    assert (cache.tables[0, 0, :5] > 0).all()
    assert (cache.tables[1, 0] > 0).tolist() == [False, False, False, True, True, False], "three tokens reach one block back"
    assert counts(cache) == (2, 3)
    assert counts(cache, 0) == (34, 0), "full attention keeps them"


def test_a_window_of_one_token_keeps_the_current_block_only(drive):
    cache = drive(num_blocks=(40, 8), kinds=("full", "window"), windows=(0, 1))
    stepwise(cache, 0, A)
    assert (cache.tables[1, 0] > 0).tolist() == [False] * 4 + [True, False]
    cache.release(0)
    assert hit(cache, A) == 10


def test_a_block_is_not_given_up_before_it_can_be_found(drive):
    cache = drive(**FULL_AND_WINDOW)
    cache.admit(0, A, want=0)
    for blocks in range(1, 6):
        cache.grow({0: blocks})
    assert (cache.tables[1, 0, :5] > 0).all(), "nothing was committed"
    cache.commit({0: A})
    cache.grow({})
    assert (cache.tables[1, 0, :5] > 0).tolist() == [False, False, False, True, True]


def test_a_sequence_that_holds_more_than_it_has_computed_keeps_what_its_next_token_reads(drive):
    """As after growing for a whole prompt at once, or when drafted tokens were refused."""
    cache = drive(**FULL_AND_WINDOW)
    cache.admit(0, A, want=0)
    cache.grow({0: 5})
    cache.commit({0: A[:4]})
    cache.grow({})
    assert (cache.tables[1, 0] > 0).tolist() == [False, True, True, True, True, False], "token 4 reads tokens 2 and 3"


def test_a_hit_needs_the_windows_tail_only(drive):
    cache = drive(**FULL_AND_WINDOW)
    served(cache, A)
    assert hit(cache, A) == 10
    stepwise(cache, 2, [51, 52, 53, 54], chunk=4)
    assert counts(cache) == (0, 5)
    stepwise(cache, 3, [61, 62, 63, 64], chunk=4)
    assert counts(cache) == (0, 3), "the first two blocks of the window are gone"
    assert hit(cache, A) == 10
    cache.admit(1, [*A, 0], want=0)
    table = cache.grow({})[0][1]
    assert (table > 0).tolist() == [True] * 5 + [False], "full attention has all of the prefix"
    assert (cache.tables[1, 1] > 0).tolist() == [False] * 4 + [True, False], "the window its last block"


def test_losing_the_tails_window_block_shortens_the_hit(drive):
    cache = drive(**FULL_AND_WINDOW)
    served(cache, A)
    served(cache, [*A[:6], 77])
    cache.grow({2: 5})
    assert counts(cache) == (0, 2)
    assert hit(cache, A) == 6, "blocks 4 and 5 were used longest ago; the prefix of three has its window"
    assert hit(cache, A[:6]) == 6


def test_without_its_window_a_prefix_is_no_hit_until_it_is_computed_again(drive):
    cache = drive(**FULL_AND_WINDOW)
    served(cache, A)
    cache.grow({2: 6})
    assert counts(cache) == (0, 1)
    assert hit(cache, A) == 10
    cache.release(2)
    cache.grow({2: 6, 3: 1})
    assert hit(cache, A) == 0, "the tree has it, the window does not"
    cache.release(2, 3)
    assert served(cache, A) == 0
    assert hit(cache, A) == 10, "the nodes that were there have their window blocks again"


def test_window_blocks_computed_twice_are_kept_once(drive):
    cache = drive(**FULL_AND_WINDOW)
    for sequence in (0, 1):
        cache.admit(sequence, A[:4], want=0)
    cache.grow({0: 2, 1: 2})
    cache.commit({0: A[:4], 1: A[:4]})
    assert (cache.tables[1, 0] == cache.tables[1, 1]).all()
    assert counts(cache) == (5, 0)


def test_a_tail_is_copied_in_every_group(drive):
    cache = drive(**(FULL_AND_WINDOW | {"block_size": 4, "max_blocks": 3}), partial=True)
    cache.serve(0, [1, 2, 3, 4, 5, 6, 7, 8])
    full, window = cache.tables[:, 0, 1]
    cache.release(0)
    assert cache.admit(1, [1, 2, 3, 4, 5, 6, 9], want=2) == (6, OK)
    cache.grow({1: 2})
    assert cache.copies[:, 1].tolist() == [[full, cache.tables[0, 1, 1]], [window, cache.tables[1, 1, 1]]]
    cache.release(1)
    cache.grow({2: 3, 3: 3})
    assert cache.admit(1, [1, 2, 3, 4, 5, 6, 9], want=2)[0] in (0, 4), "a tail without its window block is no tail"


def test_a_block_waiting_to_be_copied_takes_no_room_that_admission_promised(drive):
    """The tail's node is leased by another sequence, its window block by nobody."""
    cache = drive(num_blocks=(40, 6), block_size=4, max_blocks=5, kinds=("full", "window"), windows=(0, 1), partial=True)
    tokens = list(range(1, 17))
    cache.admit(0, tokens, want=0)
    for upto in (4, 8, 12, 16):
        cache.grow({0: upto // 4})
        cache.commit({0: tokens[:upto]})
    cache.grow({})
    assert counts(cache) == (1, 3)
    found, status = cache.admit(1, [1, 2, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9], want=4)
    assert (found, status) == (0, OK), "four blocks are wanted and four there are, the one to copy included"
    assert cache.grow({1: 4})[1][1] == OK


# Latent KV.


def test_a_latent_group_answers_what_full_attention_answers(drive):
    answers = []
    for kind in ("full", "latent"):
        cache = drive(num_blocks=(9,), kinds=(kind,), partial=True)
        answers.append([cache.serve(0, A), cache.tables.tolist()])
        cache.release(0)
        answers[-1] += [hit(cache, A[:7]), stepwise(cache, 2, [1, 2, 3, 9, 9, 9]), cache.copies.tolist()]
        answers[-1] += [cache.grow({3: 4})[1].tolist(), hit(cache, A), counts(cache, 0)]
    assert answers[0] == answers[1]


# Recurrent state.


def test_every_new_block_of_state_starts_from_the_snapshot_before_it(drive):
    cache, sources = drive(**FULL_AND_STATE), []
    cache.admit(0, A, want=0)
    for upto in (2, 4, 6):
        before = cache.host.sequences.block_table[1, 0].copy()
        cache.grow({0: upto // BS})
        sources.append(cache.copies[1, 0].tolist())
        column = upto // BS - 1
        assert sources[-1] == ([before[column - 1], cache.tables[1, 0, column]] if column else [-1, -1])
        assert (cache.copies[0] == -1).all(), "KV of full attention is not copied"
        cache.commit({0: A[:upto]})
    cache.grow({})
    assert (cache.tables[1, 0, :3] > 0).tolist() == [False, True, True], "what came before the last snapshot is given up"


def test_a_hybrid_model_hits_where_there_is_a_snapshot(drive):
    cache = drive(**FULL_AND_STATE)
    served(cache, A)
    cache.grow({2: 6})
    assert counts(cache) == (0, 1), "of five snapshots the first four went"
    assert [hit(cache, A[:n]) for n in (10, 9, 6)] == [10, 0, 0], "full attention has all of it, but a state has no middle"
    cache.release(2)
    assert served(cache, [*A, 11, 12]) == 10
    assert cache.admit(1, [*A, 11, 12, 13], want=0)[0] == 12
    cache.grow({})
    assert (cache.tables[1, 1] > 0).tolist() == [False] * 5 + [True, False], "the last snapshot is leased"


def test_each_block_boundary_is_a_place_to_go_on_from(drive):
    cache = drive(**FULL_AND_STATE)
    served(cache, A)
    assert [hit(cache, A[:n]) for n in (9, 6, 5, 1)] == [8, 6, 4, 0]


def test_no_tail_is_cut_out_of_a_recurrent_state(drive):
    cache = drive(**FULL_AND_STATE, partial=True)
    assert not cache.object.partial
    served(cache, A)
    assert hit(cache, A[:5]) == 4


# No group keeps everything.


@pytest.mark.parametrize(("kinds", "windows"), [(("window",), (3,)), (("window", "state"), (3, 0)), (("state",), (0,))])
def test_models_without_full_attention_hit_too(drive, kinds, windows):
    cache = drive(num_blocks=(9,) * len(kinds), max_blocks=7, kinds=kinds, windows=windows)
    for _ in range(4):
        stepwise(cache, 0, A)
        assert (cache.tables[:, 0] > 0).sum(axis=1).tolist() == [2] * len(kinds)
        cache.release(0)
    assert hit(cache, A) == 10
    served(cache, [*A, 11, 12])
    assert cache.admit(1, [*A, 11, 12, 0], want=6)[0] == 12


def test_a_sequence_longer_than_a_side_pool_is_served_in_steps(drive):
    cache = drive(num_blocks=(40, 5), max_blocks=12, kinds=("full", "window"), windows=(0, 3))
    tokens = np.random.default_rng(0).integers(0, 9, 24).tolist()
    assert served(cache, tokens) == 0
    assert hit(cache, tokens[:23]) == 22


# A side pool that is full.


def test_a_side_pool_that_is_full_refuses_by_rank(drive):
    cache = drive(num_blocks=(40, 6), kinds=("full", "window"), windows=(0, 3))
    status = cache.grow({0: 2, 1: 2, 2: 2, 3: 1}, rank={0: 2, 1: 0, 2: 1, 3: 3})[1]
    assert status.tolist() == [OUT_OF_BLOCKS, OK, OK, OUT_OF_BLOCKS], "nobody of higher rank after the refusal"
    assert cache.host.sequences.held.tolist() == [0, 2, 2, 0]
    assert cache.grow({3: 1})[1].tolist() == [OK] * 4
    assert cache.admit(0, A, want=5)[1] == OUT_OF_BLOCKS
    assert counts(cache) == (0, 0)


def test_of_two_side_pools_the_fuller_one_decides(drive):
    cache = drive(num_blocks=(40, 9, 4), kinds=("full", "window", "state"), windows=(0, 3, 0))
    assert cache.grow({0: 2, 1: 2})[1].tolist() == [OK, OUT_OF_BLOCKS, OK, OK]
    assert [counts(cache, g) for g in range(3)] == [(37, 0), (6, 0), (1, 0)]
