"""Inside the guest: a store and a member, whose blocks have to come by a library's RDMA and by nothing else: `blocks.py ucx|mooncake HOST WORDS`.

`WORDS` is how the member has to say that it reads. A block whose bit was flipped in the store must be a miss.
"""

from __future__ import annotations

import subprocess
import sys
import time

from octavo_core.testing import tiers as suite
from octavo_core.tiers import Answer
from octavo_offload import RemoteConfig, RemoteTier

KEY = b"octavo-rdma-guest-key"
STORE = """
import sys
from octavo_offload._src.remote.serve import readable
from octavo_offload.node import Blocks, Node
blocks = Blocks(1 << 20)
node = Node(f"{sys.argv[2]}:0", blocks, sys.argv[3].encode(), readable=readable(blocks, sys.argv[1], None, sys.argv[2]))
node.start()
print(node.address, flush=True)
for line in sys.stdin:
    (block,) = [d.blocks[bytes.fromhex(line)] for d in blocks._directories.values()]
    blocks.view(block.address, block.size)[9] ^= 1
    print("flipped", flush=True)
"""


def expect(is_so: bool, told: str) -> None:
    """Say what is so, or end with it."""
    print(f"{'ok  ' if is_so else 'FAIL'} {told} ({time.monotonic():.0f} s)", flush=True)
    if not is_so:
        sys.exit(1)


def main() -> None:
    """Put, get, damage, get."""
    way, host, words = sys.argv[1:4]
    with subprocess.Popen(
        [sys.executable, "-c", STORE, way, host, KEY.decode()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as store:
        assert store.stdin is not None
        assert store.stdout is not None
        address = store.stdout.readline().strip()
        expect(bool(address), f"a store with --transport {way} at {address}")
        config = RemoteConfig(target=address, secret=KEY, window_bytes=8 * suite.BLOCK_BYTES, deadline_s=120.0, join_s=300.0)
        tier = RemoteTier(config, suite.BLOCK_BYTES, b"rdma" * 8)
        expect(tier.told.startswith(words), f"joined: {tier.told}")
        numbers = range(6)
        expect(suite.put(tier, numbers) == (Answer.HIT_VERIFIED,) * 6, "six blocks were put")
        expect(suite.get(tier, numbers) == (Answer.HIT_VERIFIED,) * 6, "and came back, verified")
        print(suite.key_of(3).hex(), file=store.stdin, flush=True)
        store.stdout.readline()
        expect(suite.get(tier, [2, 3, 4]) == (Answer.HIT_VERIFIED, Answer.MISS, Answer.HIT_VERIFIED), "a flipped bit is a miss")
        expect(tier.num_quarantined == 0, "no slot is in quarantine")
        tier.close()
        store.kill()


if __name__ == "__main__":
    main()
