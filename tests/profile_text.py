"""Write layer graphs as PipeDream's profiler does, for tests of what reads them."""

from __future__ import annotations

from autopipe.profile import LayerGraph


def profile_text(graph: LayerGraph) -> str:
    nodes = (
        f"{node.name} -- {node.description} -- forward_compute_time={1000 * node.forward_s}, "
        f"backward_compute_time={1000 * node.backward_s}, "
        f"activation_size={node.output_bytes}, parameter_size={node.parameter_bytes}"
        for node in graph.nodes
    )
    return "\n".join([*nodes, *(f"\t{begin} -- {end}" for begin, end in graph.edges)])
