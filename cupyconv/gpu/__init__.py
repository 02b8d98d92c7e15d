"""The GPU side: kernel sources, their compilation, the parameter struct, the launch."""
