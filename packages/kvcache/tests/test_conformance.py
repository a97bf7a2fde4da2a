from octavo_core.testing.cache import check_prefix_cache
from octavo_kvcache import RadixCache


def test_the_block_cache_keeps_every_promise_of_the_seam():
    check_prefix_cache(RadixCache)
