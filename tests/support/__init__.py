"""Shared by the tests of all parts."""
