"""Tests of the arrays that the functions accept."""
