from octavo_core.specs import CacheSpec
from octavo_core.testing.cache import CacheUnderTest, check_prefix_cache, check_random_history
from octavo_kvcache import BlockCache


def test_the_block_cache_keeps_every_promise_of_the_seam():
    check_prefix_cache(BlockCache)


def test_it_keeps_them_with_one_commit_and_one_event_a_call():
    spec = CacheSpec(num_blocks=(12,), block_size=3, max_sequences=4, max_blocks=4)
    cache = CacheUnderTest(lambda spec: BlockCache(spec, max_commits=1, max_events=1), spec)
    check_random_history(cache, steps=150, seed=1)
