"""Tests of the documentation and the packages."""
