"""Which layers a model chunk holds. Arithmetic only, no torch."""

from __future__ import annotations


def stage_layers(
    num_layers: int,
    *,
    pp: int,
    pp_rank: int,
    vpp: int = 1,
    chunk: int = 0,
    standalone_embedding_stage: bool = False,
) -> range:
    """Global indices of the layers of chunk `chunk` on pipeline rank `pp_rank`.

    Chunk v of rank r starts at layer v (L / V) + r L / (P V), so a microbatch meets the layers in order when it visits
    all ranks once for chunk 0, then once for chunk 1, and so on. With `standalone_embedding_stage` rank 0 holds none
    and the others share them as P - 1 ranks would.

    Raises:
        ValueError: layers that do not divide evenly, or a rank or chunk that does not exist.
    """
    if not 0 <= pp_rank < pp or not 0 <= chunk < vpp:
        raise ValueError(
            f"pipeline rank {pp_rank} of {pp} and chunk {chunk} of {vpp} do not exist; ranks and chunks count from 0"
        )
    if standalone_embedding_stage:
        if pp == 1:
            raise ValueError("standalone_embedding_stage needs pp of at least 2; with pp 1 no rank is left for layers")
        if pp_rank == 0:
            return range(0)
        pp, pp_rank = pp - 1, pp_rank - 1
    if num_layers % (pp * vpp):
        raise ValueError(
            f"{num_layers} layers cannot be shared evenly by {pp} stages of {vpp} chunks; "
            f"the number of layers must be a multiple of {pp * vpp}"
        )
    size = num_layers // (pp * vpp)
    first = chunk * (num_layers // vpp) + pp_rank * size
    return range(first, first + size)
