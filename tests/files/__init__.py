"""Tests of files, records and signals."""
