"""Tests of explanations and their pages."""
