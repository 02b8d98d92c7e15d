"""Tests of error messages and their remedies."""
