"""Tests of text in terminals and pages."""
