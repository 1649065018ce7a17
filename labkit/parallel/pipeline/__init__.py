"""Beside p2p: the order of transfers, the handshake, activations that are let go, weight gradients that wait."""
