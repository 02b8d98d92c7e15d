"""Tests of plans, estimates and measuring."""
