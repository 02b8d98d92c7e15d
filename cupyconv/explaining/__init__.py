"""Explanations of a layer: why its tensors have their shapes, and how their values are sums."""
