"""Parts of pipelines beside p2p: order of transfers, handshake, freed activations, postponed weight gradients."""
