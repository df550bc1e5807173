"""The same update on Ray: an actor a rank, which joins the others as torchrun's processes do.

    pip install ray
    python examples/ranks/on_ray.py --ranks 2

Ray's workers get their GPU from Ray. A rank that dies ends its actor; the others are told by their time-outs, and the
driver ends them.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

import ray


@ray.remote
class Rank:
    """One rank of a group."""

    def place(self) -> tuple[str, int]:
        """An address where rank 0 may be found by the others."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, rank: int, ranks: int, address: str, port: int) -> float:
        """The update of train.py."""
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        import train

        return train.main()


def main() -> None:
    """Start the ranks, and stop at the first that fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="GPUs a rank")
    args = parser.parse_args()
    here = str(Path(__file__).parent)
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}})
    ranks = [Rank.options(num_cpus=1, num_gpus=args.gpus).remote() for _ in range(args.ranks)]
    address, port = ray.get(ranks[0].place.remote())
    waiting = [actor.run.remote(i, args.ranks, address, port) for i, actor in enumerate(ranks)]
    losses = []
    while waiting:
        done, waiting = ray.wait(waiting)
        losses += ray.get(done)  # raises what the rank raised
    print(losses)


if __name__ == "__main__":
    main()
