"""Tests of cupyconv."""
