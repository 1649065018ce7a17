"""Rank groups of a large world: labkit's plan, megatron-core's RankGenerator, torch's DeviceMesh (row C1).

    python benchmarks/groups.py            # about a minute; writes results/groups.json
    python benchmarks/groups.py --quick    # a look: 3 repetitions, nothing written

All three list every group of nine kinds of a world of 102,400 ranks (tp 8, cp 2, pp 16; experts etp 1, ep 8) as Python
lists, and the lists are compared before anything is timed. Megatron-core has a function for that. DeviceMesh has none
that is public; timed is what it computes for its process groups before it makes them: its layouts mapped to ranks, row
after row turned into a list. The last rows are labkit alone: one rank's own groups of every kind, which need no
enumeration, and one token of 131,072 ranks.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from harness import interleave, report

from labkit.comm.group_plan import GROUP_TOKENS, groups_of_rank
from labkit.comm.rank_generator import DEFAULT_ORDER, rank_generators

WORLD = 102_400
SIZES = {"tp": 8, "cp": 2, "pp": 16, "ep": 8, "etp": 1}
KINDS = ("tp", "cp", "dp", "dp_cp", "pp", "tp_cp", "mp", "ep", "edp")
Groups = dict[str, list[list[int]]]


def labkit_groups() -> Groups:
    """Ours."""
    dense, expert = rank_generators(world_size=WORLD, **SIZES)
    generators = {"dense": dense, "expert": expert}
    return {kind: generators[which].get_ranks(token) for kind in KINDS for which, token in [GROUP_TOKENS[kind]]}


def megatron_groups() -> Groups:
    """The same calls on megatron-core's RankGenerator."""
    from megatron.core.parallel_state import RankGenerator

    tp, cp, pp, ep, etp = SIZES.values()
    dp, edp = WORLD // (tp * cp * pp), WORLD // (etp * ep * pp)
    generators = {
        "dense": RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=DEFAULT_ORDER),
        "expert": RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=DEFAULT_ORDER),
    }
    return {kind: generators[which].get_ranks(token) for kind in KINDS for which, token in [GROUP_TOKENS[kind]]}


def mesh_groups() -> Groups:
    """What DeviceMesh does in `_init_one_process_group` before it calls `new_group`, for each kind."""
    import torch
    from torch.distributed._mesh_layout import _MeshLayout
    from torch.distributed.device_mesh import DeviceMesh

    tp, cp, pp, ep, etp = SIZES.values()
    shapes = {
        "dense": (("pp", "dp", "cp", "tp"), (pp, WORLD // (tp * cp * pp), cp, tp)),
        "expert": (("pp", "dp", "ep", "tp"), (pp, WORLD // (etp * ep * pp), ep, etp)),
    }
    found: Groups = {}
    meshes = {
        name: DeviceMesh("cpu", torch.arange(WORLD).view(shape), mesh_dim_names=dims, _init_backend=False, _rank=0)
        for name, (dims, shape) in shapes.items()
    }
    for kind in KINDS:
        which, token = GROUP_TOKENS[kind]
        mesh, dims = meshes[which], shapes[which][0]
        inside = [mesh._layout[dims.index(axis)] for axis in dims if axis in token.split("-")]
        rows = _MeshLayout(inside).remap_to_tensor(mesh._rank_map).flatten(1)
        found[kind] = [row.tolist() for row in rows]
    return found


def check_equal() -> None:
    """All three must list the same groups; DeviceMesh orders the groups of a kind its own way."""
    ours = labkit_groups()
    assert ours == megatron_groups()
    for kind, groups in mesh_groups().items():
        assert sorted(groups) == sorted(ours[kind]), kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 repetitions, nothing written")
    repetitions = 3 if parser.parse_args().quick else 15
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_equal()
    alternatives = {"labkit": labkit_groups, "megatron-core": megatron_groups, "DeviceMesh": mesh_groups}
    every = interleave(f"{WORLD:,} ranks, nine kinds", alternatives, repetitions=repetitions, warmup=1)
    own = interleave(
        f"one rank's own groups of {WORLD:,}, all kinds",
        {"labkit": lambda: groups_of_rank(77_777, SIZES, WORLD)},
        repetitions=repetitions,
    )
    large, _ = rank_generators(world_size=131_072, tp=8, pp=16)
    token = interleave("131,072 ranks, one token", {"labkit": lambda: large.get_ranks("dp")}, repetitions=repetitions)
    report(
        "groups",
        [every, own, token],
        title="Rank groups",
        notes=["The peers list the same groups, which is checked first; DeviceMesh's time excludes creating them."],
        write=repetitions >= 15,
    )


if __name__ == "__main__":
    main()
