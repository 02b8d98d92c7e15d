"""Tests of the repository and of the test tools."""
