"""Carry bytes between two processes: frames, codec, handshake, links."""
