"""Tests of cupyconv.torch."""
