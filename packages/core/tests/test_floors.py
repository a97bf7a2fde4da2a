import subprocess
import sys

import octavo_core

PROBE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jax", "jaxlib", "jaxtyping", "flax"}:
            raise ImportError(f"floor 1 imported {name}")

sys.meta_path.insert(0, Refuse())
import octavo_core
from octavo_core import config, errors, frames, keys, records, wire
wire.unpack_frame(wire.pack_frame(wire.FrameKind.ABORT, b"r", sequence=1))
frames.unpack_outputs(frames.pack_outputs([]), str)
keys.block_keys([1, 2], keys.namespace_of("t"), 2)
assert not {"octavo_core.specs", "octavo_core.plan", "octavo_core.seams"} & set(sys.modules)
"""


def test_floor_one_works_where_jax_cannot_be_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_are_what_the_table_of_contents_says() -> None:
    assert octavo_core.__all__ == ["config", "errors", "frames", "keys", "records", "wire"]
    assert all(getattr(octavo_core, name).__doc__ for name in octavo_core.__all__)
