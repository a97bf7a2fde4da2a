from octavo_core.testing.cache import check_prefix_cache
from octavo_kvcache import BlockCache


def test_the_block_cache_keeps_every_promise_of_the_seam():
    check_prefix_cache(BlockCache)


def test_it_keeps_them_with_one_commit_and_one_event_a_call():
    check_prefix_cache(lambda spec: BlockCache(spec, max_commits=1, max_events=1))
