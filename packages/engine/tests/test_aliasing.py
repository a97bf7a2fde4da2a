"""Why no slab is ever handed to the device: on a CPU an aligned one is aliased, and would change under the device's hands."""

import jax
import numpy as np

from octavo_core.testing.patience import PATIENCE_S
from octavo_offload import Slab, open_tiers


def test_a_slab_that_were_handed_over_would_change_on_the_device():
    view = np.frombuffer(Slab(1, 1 << 16).slot(0), np.uint8)
    view[:] = 1
    on_device = jax.block_until_ready(jax.device_put(view))
    view[:] = 9
    assert int(on_device[0]) == 9


def test_what_is_fetched_stays_as_it_is_on_the_device_when_its_slot_is_used_again():
    store = open_tiers((1 << 16,), host_bytes=1 << 16)
    try:
        store.save([b"a" * 32], [np.full((1, 1 << 16), 1, np.uint8)])
        assert store.wait_idle(PATIENCE_S)
        fetch = store.fetch([b"a" * 32], 10.0)
        assert fetch.wait(PATIENCE_S)
        (piece,) = fetch.take()
        on_device = jax.block_until_ready(jax.device_put(piece))
        store.save([b"b" * 32], [np.full((1, 1 << 16), 9, np.uint8)])
        assert store.wait_idle(PATIENCE_S)
        assert store.host.count.evicted == 1
        assert np.all(np.asarray(on_device) == 1)
    finally:
        store.close()
