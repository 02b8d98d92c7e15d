"""Tests of the shape rules."""
